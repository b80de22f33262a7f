"""What `save` writes and how: everything or nothing, in bounded memory, for anyone to read."""

import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_meta as alpa
from alpa_meta.checkpoints import saving
from alpa_meta.checkpoints.manifest import write_manifest

DOUBLE = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)


def grid(*shape, start=0):
    devices = jax.devices()[start : start + int(np.prod(shape))]
    return Mesh(np.array(devices).reshape(shape), ("a", "b")[: len(shape)])


def test_a_step_overwrites_the_state_while_it_is_written(tmp_path):
    state = {"w": jax.device_put(jnp.ones((64, 64)), NamedSharding(grid(4), P("a")))}
    saving = alpa.save(tmp_path, state, step=1)
    DOUBLE(state)
    assert state["w"].is_deleted()
    path = saving.wait()
    assert saving.done() and path == tmp_path / "step-00000001"
    assert (alpa.restore(tmp_path)["w"] == 1).all()


def test_plain_orbax_restores_it_in_a_process_without_this_package(tmp_path):
    params = {"w": jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(grid(4), P("a")))}
    cut = [jnp.zeros((3, 2), jnp.bfloat16), jnp.ones((5, 2), jnp.bfloat16)]
    state = {
        "params": params,
        "moments": optax.adam(0.1).init(params),
        "layers": alpa.PiecewiseArray(cut, [0, 3, 8]),
        "key": jax.random.key(7),
        "rate": 0.5,
        "steps": 3,
        "name": "run",
        "none": None,
        "empty": jnp.zeros((0, 2)),
    }
    path = alpa.save(tmp_path, state, step=5).wait()
    program = """
        import sys
        sys.modules.update(dict.fromkeys(("alpa_meta", "mesh_runtime", "alpa_interchange")))
        import jax, numpy as np, orbax.checkpoint as ocp
        found = ocp.StandardCheckpointer().restore(sys.argv[1])
        assert found["params"]["w"].tolist() == np.arange(32).reshape(8, 4).tolist()
        assert found["moments"][0]["mu"]["w"].shape == (8, 4)
        assert found["layers"].dtype == "bfloat16" and found["layers"].sum() == 10
        key = jax.random.wrap_key_data(found["key"])
        assert (jax.random.bits(key) == jax.random.bits(jax.random.key(7))).all()
        assert (found["rate"], found["steps"], found["name"]) == (0.5, 3, "run")
        assert found["none"] is None and found["empty"].shape == (0, 2)
        place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
        like = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place)
            if hasattr(one, "shape") else one,
            found,
        )
        like.pop("name")  # orbax takes no string there
        handler = ocp.PyTreeCheckpointer()
        arguments = ocp.checkpoint_utils.construct_restore_args(like)
        again = handler.restore(sys.argv[1], item=like, restore_args=arguments, transforms={})
        assert again["params"]["w"].devices() == {jax.devices()[1]}
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)],
        check=True,
        timeout=300,
        env={**os.environ, **flags},
    )


def test_saving_holds_no_second_copy_of_the_state(tmp_path):
    program = """
        import resource, sys, jax.numpy as jnp
        import alpa_meta as alpa
        alpa.save(sys.argv[1], {"x": jnp.ones(3)}).wait()
        state = {f"x{k}": jnp.full((1 << 20,), k, jnp.float32) for k in range(64)}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        alpa.save(sys.argv[1], state, host_bytes=16 << 20).wait()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    found = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    assert int(found.stdout) << 10 < 100 << 20  # of 256 MiB: what is under way, twice, and more


def test_a_failed_save_leaves_nothing_behind_and_older_ones_whole(tmp_path, monkeypatch):
    state = {"w": jnp.ones(4)}
    alpa.save(tmp_path, state, step=1).wait()
    monkeypatch.setattr(
        saving, "write_manifest", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
    )
    with pytest.raises(alpa.CheckpointError, match="cannot be written: full"):
        alpa.save(tmp_path, state, step=2).wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert alpa.read_checkpoint(tmp_path).step == 1


@pytest.mark.parametrize("steps", [(5, 5), (5, 3)])
def test_the_checkpoint_begun_last_is_the_newest_however_long_the_one_before_takes(
    tmp_path, monkeypatch, steps
):
    first = threading.Event()

    def slow(*given):
        if not first.is_set():
            first.set()
            time.sleep(1.0)
        write_manifest(*given)

    monkeypatch.setattr(saving, "write_manifest", slow)
    begun = [alpa.save(tmp_path, {"w": jnp.zeros(4)}, step=steps[0])]
    assert first.wait(60)
    begun.append(alpa.save(tmp_path, {"w": jnp.ones(4)}, step=steps[1]))
    newest = [one.wait() for one in begun][-1]
    assert alpa.read_checkpoint(tmp_path).path == newest
    assert (alpa.restore(tmp_path)["w"] == 1).all()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(alpa.CheckpointError, match="file/run: cannot be written: Not a directory"):
        alpa.save(tmp_path / "file" / "run", {"w": jnp.ones(2)})


@pytest.mark.fault(
    "full disk, folder that cannot be written",
    "a warning while training, refused at the start",
)
@pytest.mark.skipif(not os.path.exists("/dev/shm"), reason="needs a file system in memory")
def test_a_full_disk_is_said_by_the_saving(tmp_path):
    """A limit on the size of files stands for the disk: it makes the same calls fail."""
    program = """
        import resource, signal, sys, jax.numpy as jnp
        import alpa_meta as alpa
        alpa.save(sys.argv[1], {"x": jnp.ones(3)}, step=1).wait()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            alpa.save(sys.argv[1], {"x": jnp.ones(1 << 20)}, step=2).wait()
        except alpa.CheckpointError as error:
            print(error)
        print(alpa.read_checkpoint(sys.argv[1]).step)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    found = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    said, step = found.stdout.splitlines()
    assert "cannot be written" in said and "File too large" in said
    assert step == "1" and [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.sample(moment=2)
@pytest.mark.parametrize("moment", ["arrays", "rename", "merge", "manifest"])
def test_a_crash_leaves_the_whole_checkpoint_or_none(tmp_path, moment):
    program = """
        import os, signal, sys, jax.numpy as jnp
        import alpa_meta as alpa
        from alpa_meta.checkpoints import orbax_files, saving
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        alpa.save(sys.argv[1], {"x": jnp.ones(3)}, step=1).wait()
        target, name = {
            "arrays": (saving.ArrayWriter, "finish"),
            "merge": (orbax_files.OrbaxFiles, "merge"),
            "manifest": (saving, "write_manifest"),
            "rename": (os, "rename"),
        }[sys.argv[2]]
        setattr(target, name, die)
        alpa.save(sys.argv[1], {"x": jnp.zeros(3)}, step=2).wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), moment]
    assert subprocess.run(command, timeout=300).returncode == -9
    assert sum(path.name.startswith(".partial-") for path in tmp_path.iterdir()) == 1
    assert alpa.restore(tmp_path)["x"].tolist() == [1, 1, 1]
    alpa.save(tmp_path, {"x": jnp.zeros(3)}, step=3).wait()  # takes away what was left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_states_that_have_no_values_are_refused():
    cases = [
        (jax.ShapeDtypeStruct((2,), np.float32), r"\['x'\]: is a ShapeDtypeStruct"),
        (np.array(["a"]), r"\['x'\]: arrays of dtype <U1 cannot be saved"),
    ]
    gone = jnp.ones(3)
    DOUBLE(gone)
    cases.append((gone, r"\['x'\]: was given away to a step"))
    for leaf, message in cases:
        with pytest.raises(alpa.CheckpointError, match=message):
            alpa.save("/nowhere", {"x": leaf})


def test_leaves_that_orbax_would_keep_in_one_place_are_refused(tmp_path):
    with pytest.raises(alpa.CheckpointError, match="two leaves of this state as 'a.b' and 'a.b'"):
        alpa.save(tmp_path, {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_settings_that_are_no_json_are_refused_at_once(tmp_path):
    with pytest.raises(TypeError, match="JSON"):
        alpa.save(tmp_path, {"w": jnp.ones(1)}, settings={"f": object()})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"step": -1}, "step must be at least 0 and below 10.18, got -1"),
        ({"step": 10**18}, "step must be at least 0"),
        ({"step": 2.5}, "step must be an integer, got 2.5"),
        ({"step": "2"}, "step must be an integer, got '2'"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"keep": -1}, "keep must be at least 1"),
    ],
)
def test_numbers_that_no_checkpoint_can_have_are_refused_at_once(tmp_path, asked, message):
    with pytest.raises((TypeError, ValueError), match=message):
        alpa.save(tmp_path / "run", {"w": np.ones(2)}, **asked)
    assert not (tmp_path / "run").exists()


def test_the_step_may_be_the_number_that_a_state_counts(tmp_path):
    for step in (np.int64(3), jax.numpy.int32(4), True):
        path = alpa.save(tmp_path, {"w": np.ones(2)}, step=step).wait()
        assert alpa.read_checkpoint(path).step == int(step)


def test_importing_the_package_imports_neither_orbax_nor_tensorstore():
    program = (
        "import sys, alpa_meta, alpa_meta.api, alpa_meta.checkpoints.restoring;"
        "print([name for name in sys.modules if name in ('orbax.checkpoint', 'tensorstore')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


def test_without_orbax_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("alpa_meta.extras.find_spec", lambda name: None)
    for call in (lambda: alpa.save(tmp_path, {}), lambda: alpa.restore(tmp_path)):
        with pytest.raises(ImportError, match=r"needs orbax.checkpoint, .*alpa-meta\[checkpoint\]"):
            call()


def test_the_manifest_names_every_file(tmp_path):
    path = alpa.save(tmp_path, {"w": jnp.ones((8, 8)), "s": "x"}, step=4).wait()
    named = {one["path"] for one in json.loads((path / "alpa.json").read_text())["value"]["files"]}
    there = {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}
    assert there == named | {"alpa.json"}
