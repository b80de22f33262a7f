"""Checkpoints of older versions, made here as they made them."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa


def write_old(folder, arrays, settings, compressed=False, **changes):
    place = folder / "step-00000004"
    place.mkdir(parents=True)
    raw = {"bfloat16": np.uint16}
    stored = {
        f"leaf_{k}": one.view(raw[str(one.dtype)]) if str(one.dtype) in raw else one
        for k, one in enumerate(arrays.values())
    }
    (np.savez_compressed if compressed else np.savez)(place / "state.npz", **stored)
    manifest = {
        "schema": "AlpaCheckpoint",
        "version": 1,
        "step": 4,
        "settings": settings,
        "arrays_sha256": hashlib.sha256((place / "state.npz").read_bytes()).hexdigest(),
        "leaves": [
            {"path": path, "dtype": str(one.dtype), "shape": list(one.shape)}
            for path, one in arrays.items()
        ],
        **changes,
    }
    (place / "checkpoint.json").write_text(json.dumps(manifest))
    return place


def test_an_old_checkpoint_is_read_with_a_note_and_the_next_one_is_of_the_present(tmp_path):
    arrays = {"['w']": np.ones((2, 3), jnp.bfloat16), "['n']": np.array(3, np.int32)}
    write_old(tmp_path, arrays, {"run": {}})
    like = {"w": jnp.zeros((2, 3), jnp.bfloat16), "n": jnp.int32(0)}
    with pytest.warns(UserWarning, match="is of an older alpa-meta"):
        found = alpa.restore(tmp_path, like=like)
    assert found["w"].tolist() == [[1] * 3] * 2 and int(found["n"]) == 3
    alpa.save(tmp_path, found, step=5, keep=1).wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_the_state_of_a_user_s_program_is_read_by_its_paths(tmp_path):
    key = jax.random.key(3)
    arrays = {repr(["['key']"]): np.asarray(jax.random.key_data(key))}
    arrays[repr(["['rate']"])] = np.array(0.5, np.float32)
    write_old(tmp_path, arrays, {"step": "module:make"})
    checkpoint = alpa.read_checkpoint(tmp_path)
    found = checkpoint.restore({"key": jax.random.key(0), "rate": 1.0, "act": jnp.tanh})
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(key)).all()
    assert found["rate"] == 0.5 and (checkpoint.step, "step" in checkpoint.settings) == (4, True)


@pytest.mark.fault(
    "checkpoint truncated, changed, hostile", "passed over for the one before, in bounded memory"
)
def test_a_bomb_is_refused_unpacked(tmp_path):
    arrays = {"['w']": np.zeros(1 << 24, np.uint8)}
    write_old(tmp_path, arrays, {}, compressed=True)
    with pytest.raises(alpa.CheckpointError, match="unpacks to .* bytes from"):
        alpa.restore(tmp_path)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("[" * 10**5, "not a readable checkpoint"),
        ("{", "not a readable checkpoint"),
        ('{"schema": "other", "version": 1}', "is not a checkpoint of alpa"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, manifest, message):
    place = write_old(tmp_path, {"['w']": np.ones(2)}, {})
    (place / "checkpoint.json").write_text(manifest)
    with pytest.raises(alpa.CheckpointError, match=message):
        alpa.restore(tmp_path)


def test_damaged_arrays_are_refused(tmp_path):
    place = write_old(tmp_path, {"['w']": np.ones(2)}, {}, arrays_sha256="0" * 64)
    with pytest.raises(alpa.CheckpointError, match="is damaged"):
        alpa.restore(tmp_path)
    (place / "state.npz").unlink()
    with pytest.raises(alpa.CheckpointError, match=r"state\.npz: cannot be read"):
        alpa.restore(tmp_path)
