from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime import InProcessRuntime, Pace


def test_three_hundred_steps_issued_without_waiting_do_not_deadlock(meshes):
    (mesh,) = meshes(1, (4, 2))

    def local(w, x):
        for _ in range(4):
            w = jax.lax.psum(jax.lax.psum(w @ x, "data") / 4, "model") / 2
        return (w,)

    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P()), out_specs=(P(),), check_vma=False),
        donate_argnums=0,
    )
    step = Instruction(kind="run", task="step", inputs=("w", "x"), outputs=("new_w",))
    runtime = InProcessRuntime([mesh])
    runtime.load(
        PipelineSchedule(name="one", num_stages=1, num_microbatches=1, programs=((step,),)),
        executables={"step": run},
        shardings=[{"w": P(), "x": P()}],
        carry={"new_w": "w"},
    )
    identity, ones = np.eye(200, dtype=np.float32), np.ones((200, 200), np.float32)
    runtime.put({"w": ones, "x": identity})
    for _ in range(300):  # jax alone stops at a few hundred: its threads wait for one another
        runtime.step({})
    np.testing.assert_array_equal(runtime.fetch(["w"])["w"], ones)


def test_every_fourth_run_of_a_host_mesh_is_waited_for(meshes):
    (mesh,) = meshes(1, (4, 2))
    pace, waited = Pace(mesh), []

    def result():
        return SimpleNamespace(block_until_ready=lambda: waited.append(True))

    for _ in range(8):
        pace.issued([result()])
    assert len(waited) == 2


def test_a_run_that_the_pace_waits_for_is_traced_with_all_its_time(meshes):
    (mesh,) = meshes(1, (4, 2))
    slow = jax.jit(lambda x: (jax.lax.fori_loop(0, 30, lambda _, y: jnp.sin(y @ y), x),))
    run = Instruction(kind="run", task="slow", inputs=("x",), outputs=("y",))
    runtime = InProcessRuntime([mesh], trace="ready")
    runtime.load(
        PipelineSchedule(name="one", num_stages=1, num_microbatches=1, programs=((run,),)),
        executables={"slow": slow},
        shardings=[{"x": P()}],
    )
    runtime.put({"x": np.ones((200, 200), np.float32)})
    runtime.step({})  # compiles
    seconds = []
    for _ in range(8):
        runtime.step({})
        (event,) = runtime.trace
        seconds.append(event.stop - event.start)
    assert min(seconds) > max(seconds) / 10
