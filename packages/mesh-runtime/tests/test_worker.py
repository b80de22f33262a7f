from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from alpa_interchange.document import to_json
from mesh_runtime import InProcessRuntime, StepError, check_schedule
from mesh_runtime.data_plane import DataPlane, new_token
from mesh_runtime.worker import MeshWorker, WorkerMesh, WorkerProgram, worker_name


@pytest.fixture
def workers(meshes):
    """Return a function that makes one worker per mesh, in threads of this process."""
    made = []

    def make(count, shape):
        token = new_token()
        grids = [WorkerMesh(shape=shape, axis_names=("data", "model"), num_hosts=1)] * count
        for index, mesh in enumerate(meshes(count, shape)):
            plane = DataPlane(worker_name(index, 0), token)
            made.append(MeshWorker(index, 0, grids, plane, list(mesh.devices.flat)))
        addresses = {worker.name: worker.plane.address for worker in made}
        for worker in made:
            worker.plane.connect(addresses)
        return made

    yield make
    for worker in made:
        worker.close()


def programs(job, meshes, timeout=30.0, trace="none"):
    order, exported = check_schedule(job.schedule), job.exported(meshes)
    specs = tuple({value: tuple(spec) for value, spec in mapping.items()} for mapping in job.specs)
    return [
        WorkerProgram(
            schedule=to_json(job.schedule),
            executables=exported,
            specs=specs,
            inputs=order.inputs[mesh],
            outputs=tuple(name for name in job.outputs if name in order.remaining[mesh]),
            carry={a: b for a, b in job.carry.items() if b in order.inputs[mesh]},
            donated=job.donated,
            trace=trace,
            timeout=timeout,
        )
        for mesh in range(job.num_stages)
    ]


def share(program, arrays):
    return {name: array for name, array in arrays.items() if name in program.inputs}


def step_all(workers, loaded, number, batch):
    with ThreadPoolExecutor(len(workers)) as pool:
        futures = [
            pool.submit(worker.step, number, share(program, batch))
            for worker, program in zip(workers, loaded, strict=True)
        ]
        return [future.exception() or future.result() for future in futures]


def test_workers_that_share_nothing_but_sockets_train_like_one_process(pipeline, meshes, workers):
    job, cut = pipeline(2, 4), meshes(2)
    team, loaded = workers(2, (2, 2)), programs(job, cut, trace="blocking")
    for worker, program in zip(team, loaded, strict=True):
        worker.load(program)
        worker.put(share(program, job.state()))
    runtime = InProcessRuntime(cut)
    runtime.load(
        job.schedule,
        job.exported(cut),
        job.specs,
        outputs=job.outputs,
        carry=job.carry,
        donated=job.donated,
    )
    runtime.put(job.state())
    for number in range(3):
        results = step_all(team, loaded, number, job.batch(number))
        ((box, loss),) = results[1][0][job.outputs[0]]
        assert box == () and loss == runtime.step(job.batch(number))[job.outputs[0]]
        assert [len(trace) for _, trace in results] == [
            len(program) for program in job.schedule.programs
        ]
    for index, name in enumerate(("w0", "w1")):
        tiles = team[index].fetch([name])[name]
        whole = np.asarray(runtime.fetch([name])[name])
        assert len(tiles) == 2  # cut over the model axis, replicas left out
        for box, tile in tiles:
            np.testing.assert_array_equal(tile, whole[tuple(slice(a, b) for a, b in box)])


def test_a_worker_whose_peer_stays_silent_says_what_it_waited_for(pipeline, meshes, workers):
    job, cut = pipeline(2, 2), meshes(2, (1, 1))
    team, loaded = workers(2, (1, 1)), programs(job, cut, timeout=0.3)
    team[1].load(loaded[1])
    team[1].put(share(loaded[1], job.state()))
    with pytest.raises(
        StepError,
        match=r"mesh 1, instruction 1 \(receive of microbatch 0 of h1@0 from mesh 0\) on host 0 "
        r"failed: .*waited 0.3 s for step 0: h1@0 from mesh 0",
    ):
        team[1].step(0, share(loaded[1], job.batch(0)))


def test_a_worker_whose_peer_goes_away_fails_at_once(pipeline, meshes, workers):
    job, cut = pipeline(2, 2), meshes(2, (1, 1))
    team, loaded = workers(2, (1, 1)), programs(job, cut)
    for worker, program in zip(team, loaded, strict=True):
        worker.load(program)
        worker.put(share(program, job.state()))
    step_all(team, loaded, 0, job.batch(0))
    team[0].close()
    with pytest.raises(StepError, match="from mesh 0 host 0, but its connection ended"):
        team[1].step(1, share(loaded[1], job.batch(1)))


def test_a_missing_input_is_named(pipeline, meshes, workers):
    job, cut = pipeline(1, 2), meshes(1, (1, 2))
    (worker,), (program,) = workers(1, (1, 2)), programs(job, cut)
    worker.load(program)
    with pytest.raises(StepError, match="mesh 0 reads 'w0' before anything writes it"):
        worker.step(0, job.batch(0))


def test_the_number_of_devices_must_be_that_of_the_mesh():
    plane = DataPlane("mesh 0 host 0", new_token())
    grid = WorkerMesh(shape=(3,), axis_names=("x",), num_hosts=1)
    with pytest.raises(ValueError, match=r"mesh of shape \(3,\) needs 3 devices .* sees 2"):
        MeshWorker(0, 0, [grid], plane, jax.devices()[:2])
    plane.close()
