import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_meta.trainer.checkpoint import (
    CheckpointError,
    checkpoint_paths,
    read_checkpoint,
    restore_state,
    save_checkpoint,
)


def _state(seed=0):
    random = np.random.default_rng(seed)
    return {
        "params": {"w": random.normal(size=(3, 4)).astype(np.float32), "b": np.float32(1.5)},
        "half": jnp.asarray(random.normal(size=5), jnp.bfloat16),
        "count": np.int32(7),
    }


def _shapes(state):
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, state))


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    state = _state()
    save_checkpoint(tmp_path, state, step=3, settings={"seed": 1})
    checkpoint = read_checkpoint(tmp_path)
    restored = restore_state(checkpoint, _shapes(state))
    assert checkpoint.step == 3
    assert checkpoint.settings == {"seed": 1}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert np.asarray(before).dtype == after.dtype
        assert np.asarray(before).tobytes() == after.tobytes()


def test_the_newest_checkpoint_is_read_and_only_two_are_kept(tmp_path):
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, _state(step), step=step, settings={})
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step-00000010", "step-00000015"]
    assert read_checkpoint(tmp_path).step == 15


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, _state(), step=1, settings={})

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, _state(), step=2, settings={})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_flipped_byte_is_found(tmp_path):
    path = save_checkpoint(tmp_path, _state(), step=1, settings={}) / "state.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a checkpoint of alpa"),
        ('{"schema": "AlpaCheckpoint", "version": 99}', "has version 99"),
        ('{"schema": "AlpaCheckpoint", "version": 1}', "has no arrays_sha256"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, content, message):
    path = save_checkpoint(tmp_path, _state(), step=1, settings={})
    (path / "checkpoint.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path)


def test_a_manifest_that_lies_about_the_arrays_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, _state(), step=1, settings={})
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["leaves"][0]["shape"] = [1000]
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not a readable checkpoint"):
        read_checkpoint(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        read_checkpoint(tmp_path)
    path = save_checkpoint(tmp_path, _state(), step=1, settings={})
    (path / "state.npz").unlink()
    with pytest.raises(CheckpointError, match=r"state\.npz: cannot be read"):
        read_checkpoint(tmp_path)
    shutil.rmtree(path)


def test_a_checkpoint_of_another_program_is_refused_leaf_by_leaf(tmp_path):
    save_checkpoint(tmp_path, _state(), step=1, settings={})
    other = _state()
    other["params"]["w"] = np.zeros((3, 5), np.float32)
    other["extra"] = np.zeros(2, np.float32)
    del other["count"]
    with pytest.raises(CheckpointError) as caught:
        restore_state(read_checkpoint(tmp_path), _shapes(other))
    message = str(caught.value)
    assert "3 leaves differ" in message
    assert "['params']['w'] is float32[3, 4] in the checkpoint and float32[3, 5]" in message
    assert "['extra'] is missing" in message
    assert "['count'] is not in the program" in message
