import os
import signal
import sys
import threading
import time
from importlib.util import find_spec

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attrs import evolve
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ray_nodes import started

from mesh_runtime import (
    ExportedProgram,
    InProcessRuntime,
    RayMesh,
    RayOptions,
    RayRuntime,
    RemoteArray,
    StaleArrayError,
    StepError,
    WorkerError,
)

NAMES = ("data", "model")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra mesh-runtime[ray]")
resharding = pytest.importorskip("resharding", reason="its planner and transport are handed in")
HANDED_IN = {"planner": resharding.plan, "transport": resharding.HostTransport}


@pytest.fixture(scope="module")
def nodes():
    """Make a cluster of two nodes, each its own set of Ray processes."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
    started(lambda: cluster.add_node(num_cpus=2))
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.ray
@needs_ray
def test_meshes_in_other_processes_train_like_one_process_and_a_dead_one_is_named(pipeline, nodes):
    # mesh 0: one jax.distributed group of two processes on two nodes; mesh 1: one process
    job = pipeline(2, 3)
    grid = np.array(jax.devices()[:6])
    local = [
        Mesh(part, NAMES, axis_types=(AxisType.Auto,) * 2)
        for part in (grid[:4].reshape(2, 2), grid[4:].reshape(2, 1))
    ]
    exported = job.exported(local)
    contract = {"outputs": job.outputs, "carry": job.carry}
    reference = InProcessRuntime(local)
    reference.load(job.schedule, exported, job.specs, **contract)
    reference.put(job.state())

    runtime = RayRuntime(
        [
            RayMesh(shape=(2, 2), axis_names=NAMES, num_hosts=2, hosts=(0, 1)),
            RayMesh(shape=(2, 1), axis_names=NAMES, hosts=(1,)),
        ],
        RayOptions(step_timeout=120.0, placement="STRICT_SPREAD", checksum=True),
        trace="blocking",
        **HANDED_IN,
    )
    try:
        with pytest.raises(
            TypeError, match="'backward0', .* are no ExportedProgram; serialise them"
        ):
            runtime.load(job.schedule, job.jitted(), job.specs)
        runtime.load(job.schedule, exported, job.specs, **contract)
        runtime.put(job.state())
        for number in range(2):
            got, wanted = runtime.step(job.batch(number)), reference.step(job.batch(number))
            np.testing.assert_allclose(got["loss1"], wanted["loss1"], rtol=1e-6)
        for name, array in runtime.fetch(["w0", "w1"]).items():
            # mesh 0 adds across processes in gloo's order: float32 rounding, nothing more
            np.testing.assert_allclose(array, reference.fetch([name])[name], rtol=1e-5, atol=1e-6)
        assert [e.mesh for e in runtime.trace].count(1) == len(job.schedule.programs[1])
        assert all(event.stop >= event.start for event in runtime.trace)

        processes = runtime.workers.process_ids
        assert sorted(processes) == ["mesh 0 host 0", "mesh 0 host 1", "mesh 1 host 0"]
        threading.Timer(0.05, os.kill, (processes["mesh 1 host 0"], signal.SIGKILL)).start()
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="the worker of mesh 1 host 0 died during step"):
            for number in range(2, 500):
                runtime.step(job.batch(number))
        assert time.monotonic() - begin < 100  # `step_timeout` is 120
        with pytest.raises(RuntimeError, match="cannot be used any more: the worker of mesh 1"):
            runtime.step(job.batch(0))
    finally:
        runtime.close()
    _await_end(processes)


@pytest.mark.ray
@needs_ray
@pytest.mark.fault(
    "a task that one worker cannot compile",
    "refused with the task's name; workers and state are kept",
)
def test_the_object_store_carries_values_and_a_hanging_worker_is_named(pipeline, nodes):
    job = pipeline(2, 2)
    local = [
        Mesh(np.array([device]).reshape(1, 1), NAMES, axis_types=(AxisType.Auto,) * 2)
        for device in jax.devices()[:2]
    ]
    grids = [RayMesh(shape=(1, 1), axis_names=NAMES)] * 2
    options = RayOptions(step_timeout=120.0, data_plane="object-store")
    runtime = RayRuntime(grids, options, **HANDED_IN)
    try:
        runtime.load(
            job.schedule,
            job.exported(local),
            job.specs,
            outputs=job.outputs,
            carry=job.carry,
        )
        runtime.put(job.state())
        losses = [float(runtime.step(job.batch(step))[job.outputs[0]]) for step in range(2)]
        np.testing.assert_allclose(losses, job.reference(2)[0], rtol=1e-5)
        _check_handles(runtime, job, local)

        # a worker that hangs is found by its heartbeat and named, with what waits for it
        processes = runtime.workers.process_ids
        assert {str(one) for one in runtime.workers.progress().values()} == {"is idle"}
        os.kill(processes["mesh 1 host 0"], signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(
            WorkerError,
            match=r"step: no answer from mesh 1 host 0 nor a heartbeat for 8 s.* Meanwhile mesh 0 "
            r"host 0 is at mesh 0, instruction .* of microbatch .* of step 4, "
            r"waiting for mesh 1 host 0 for",
        ):
            runtime.step(job.batch(2))
        assert time.monotonic() - begin < 100  # `step_timeout` is 120
    finally:
        runtime.close()
    _await_end(processes)


@pytest.mark.ray
@needs_ray
def test_the_driver_calls_as_many_functions_for_a_step_of_many_microbatches_as_for_one_of_few(
    pipeline, nodes
):
    local = [
        Mesh(np.array([device]).reshape(1, 1), NAMES, axis_types=(AxisType.Auto,) * 2)
        for device in jax.devices()[:2]
    ]
    runtime = RayRuntime([RayMesh(shape=(1, 1), axis_names=NAMES)] * 2, **HANDED_IN)
    calls, instructions = [], []
    try:
        for num_microbatches in (2, 24):
            job = pipeline(2, num_microbatches)
            contract = {"outputs": job.outputs, "carry": job.carry, "joined": {"h1": 0}}
            runtime.load(job.keeping("h1"), job.exported(local), job.specs, **contract)
            runtime.put(job.state())
            made = runtime.step(job.whole(0))
            hidden = np.tanh(job.whole(0)["x"] @ job.state()["w0"])
            np.testing.assert_allclose(made["h1"], hidden, rtol=1e-5, atol=1e-6)
            assert made["h1"].shape == hidden.shape
            losses = [float(made[job.outputs[0]]), float(runtime.step(job.whole(1))["loss1"])]
            np.testing.assert_allclose(losses, job.reference(2)[0], rtol=1e-5)
            batch = job.whole(2)
            calls.append(_calls_of_this_package(lambda batch=batch: runtime.step(batch)))
            instructions.append(sum(map(len, job.schedule.programs)))
    finally:
        runtime.close()
    assert instructions[1] > 8 * instructions[0]
    assert calls[0] == calls[1] > 10


def _calls_of_this_package(action):
    """Return how many calls of functions of the package, but for the waiting, an action makes."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        file = frame.f_code.co_filename
        if event == "call" and "mesh_runtime/" in file and "heartbeats" not in file:
            count += frame.f_code.co_name not in ("_call", "_repeated", "<genexpr>", "<listcomp>")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.ray
@needs_ray
@pytest.mark.parametrize("mapped", [True, False])
def test_two_hosts_that_read_the_same_large_batch_take_it_from_one_place(pipeline, nodes, mapped):
    job = evolve(pipeline(1, 8), width=1024)  # 131 kB of x, which Ray does not send with a call
    local = [
        Mesh(np.array(jax.devices()[:2]).reshape(1, 2), NAMES, axis_types=(AxisType.Auto,) * 2)
    ]
    reference = InProcessRuntime(local)
    runtime = RayRuntime([RayMesh(shape=(1, 2), axis_names=NAMES, num_hosts=2)], **HANDED_IN)
    assert runtime.workers.memory is not None  # all are on this machine
    if not mapped:
        runtime.workers.memory = None
    losses = []
    try:
        for one, give in ((reference, job.batch), (runtime, job.batch), (runtime, job.whole)):
            contract = {"outputs": job.outputs, "carry": job.carry}
            one.load(job.schedule, job.exported(local), job.specs, **contract)
            one.put(job.state())
            losses.append([float(one.step(give(step))[job.outputs[0]]) for step in range(4)])
    finally:
        runtime.close()
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)  # gloo adds in another order
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-5)


def _check_handles(runtime, job, local):
    """State may also be given to steps by its handles; what is wrong with it changes nothing."""
    other = RayRuntime(runtime.workers)
    with pytest.raises(ValueError, match="needs a planner: give it planner=resharding.plan"):
        other.load(job.schedule, job.exported(local), job.specs)
    other = RayRuntime(runtime.workers, planner=resharding.plan)
    carry = {"outputs": (*job.outputs, *job.carry), "carry": job.carry}
    other.load(job.schedule, job.exported(local), job.specs, **carry)
    state = other.place(job.state())
    assert repr(state["w1"]) == "RemoteArray(float32[8, 8] on mesh 1)"
    wrong = {**job.batch(0), "x@1": np.ones((3, 8), np.float32)}
    with pytest.raises(ValueError, match=r"'x@1' must be float32\[4, 8\], .* got float32\[3, 8\]"):
        other.step({**state, **wrong})
    losses = []
    for number in range(2):
        results = other.step({**state, **job.batch(number)})
        old, state = state, {name: results[made] for made, name in job.carry.items()}
        losses.append(float(results[job.outputs[0]]))
    np.testing.assert_allclose(losses, job.reference(2)[0], rtol=1e-5)
    with pytest.raises(StaleArrayError, match="was given away to step 2 as 'w0', which overwrote"):
        other.step({**old, **job.batch(2)})
    with pytest.raises(StaleArrayError, match="mesh 1, gone"):
        np.asarray(old["w1"])
    seed = jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(local[1], P()))
    make = jax.export.export(jax.jit(lambda seed: (jnp.full((8, 8), seed),)))(seed)
    program = ExportedProgram(program=bytes(make.serialize()))
    (born,) = other.init({1: program}, [np.float32(0.5)])[1]
    assert isinstance(born, RemoteArray) and born.meshes == (1,) and np.all(np.asarray(born) == 0.5)
    with pytest.raises(KeyError, match="no mesh holds buffer 'w0'; resident are nothing"):
        other.fetch(["w0"])
    programs = job.exported(local)
    programs["update1"] = evolve(programs["update1"], options={"no_such_option": True})
    refusing = RayRuntime(runtime.workers, planner=resharding.plan)
    with pytest.raises(
        StepError,
        match="load failed on mesh 1 host 0: task .update1. cannot be compiled: .*such",
    ):
        refusing.load(job.schedule, programs, job.specs, **carry)
    refusing.close()
    other.close()
    runtime.step(job.batch(2))  # the workers and its own state are as they were


def _await_end(processes):
    deadline = time.monotonic() + 100
    while any(_alive(pid) for pid in processes.values()):
        assert time.monotonic() < deadline, "workers outlived their runtime"
        time.sleep(0.1)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@needs_ray
def test_an_unknown_trace_mode_is_refused():
    with pytest.raises(ValueError, match="trace must be one of .*, got 'loud'"):
        RayRuntime([RayMesh(shape=(1,), axis_names=("x",))], trace="loud")
