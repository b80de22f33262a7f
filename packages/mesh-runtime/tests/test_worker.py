import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from attrs import evolve

from alpa_interchange.document import from_json
from alpa_interchange.reshard import PlacedTensor, ReshardingTask
from alpa_interchange.schedule import PipelineSchedule
from alpa_interchange.tensor import ShardingSpec, TensorType
from mesh_runtime import InProcessRuntime, StepError, check_schedule, value_name
from mesh_runtime.layout import Layout, host_tiles
from mesh_runtime.transfers import device_numbers, device_owners
from mesh_runtime.worker import MeshWorker
from mesh_runtime.worker_mesh import WorkerMesh, worker_name
from mesh_runtime.worker_types import WorkerProgram, WorkerStep, own_list

resharding = pytest.importorskip("resharding", reason="its transport is handed to the workers")


@pytest.fixture
def workers(meshes):
    """Return a function that makes one worker per mesh, in threads of this process."""
    made = []

    def make(count, shape):
        token = resharding.new_token()
        grids = [WorkerMesh(shape=shape, axis_names=("data", "model"), num_hosts=1)] * count
        for index, mesh in enumerate(meshes(count, shape)):
            transport = resharding.HostTransport(worker_name(index, 0), token)
            made.append(MeshWorker(index, 0, grids, transport, list(mesh.devices.flat)))
        transports = {w.name: w.transport for w in made if w.transport is not None}
        addresses = {name: transport.address for name, transport in transports.items()}
        for transport in transports.values():
            transport.connect(addresses, device_owners(grids))
        return made

    yield make
    for worker in made:
        worker.close()


def programs(job, meshes, timeout=100.0):
    exported = job.exported(meshes)
    layouts = tuple(
        {value: Layout(mesh.axis_sizes, mesh.axis_names, tuple(spec)) for value, spec in of.items()}
        for mesh, of in zip(meshes, job.specs, strict=True)
    )
    return [
        WorkerProgram(
            plan="one",
            schedule=own_list(job.schedule, mesh),
            executables=exported,
            layouts=layouts[mesh],
            timeout=timeout,
        )
        for mesh in range(job.num_stages)
    ]


def install(worker, program):
    """Load a program and the plans by which its values move: h1@m forth, d0@m back."""
    answer = worker.load(program)
    size = worker.meshes[0].num_devices

    def placed(mesh):
        return PlacedTensor(
            spec=ShardingSpec((("data",), ())),
            axis_names=("data", "model"),
            mesh_shape=worker.meshes[mesh].shape,
            devices=tuple(range(mesh * size, mesh * size + size)),
            hosts=(mesh,) * size,
        )

    moves = {}
    for value, source, target in (("h1", 0, 1), ("d0", 1, 0)):
        task = ReshardingTask(
            tensor=TensorType((4, 8), "float32"), source=placed(source), target=placed(target)
        )
        moves[value, source, target] = resharding.plan(task)
    worker.route(program.plan, moves)
    return answer


def share(worker, program, job, arrays):
    order, layouts = check_schedule(job.schedule), program.layouts
    return {
        name: host_tiles(array, layouts[value_name(name)], 1)[0]
        for name, array in arrays.items()
        if name in order.inputs[worker.mesh]
    }


def place(worker, program, job):
    worker.place("one", share(worker, program, job, job.state()), {"w0": 0, "w1": 1})


def work(worker, program, job, number, trace="none"):
    """Return what is to be done in a step: array k is the weight of stage k after step k // 10."""
    stage = worker.mesh
    remaining = check_schedule(job.schedule).remaining[stage]
    return WorkerStep(
        plan="one",
        number=number,
        bound={f"w{stage}": 10 * number + stage},
        placed=share(worker, program, job, job.batch(number)),
        kept={f"new_w{stage}": 10 * number + 10 + stage},
        returned=tuple(name for name in job.outputs if name in remaining),
        trace=trace,
    )


def step_all(workers, loaded, job, number, trace="none"):
    with ThreadPoolExecutor(len(workers)) as pool:
        futures = [
            pool.submit(worker.step, work(worker, program, job, number, trace))
            for worker, program in zip(workers, loaded, strict=True)
        ]
        return [future.exception() or future.result() for future in futures]


def test_workers_that_share_nothing_but_sockets_train_like_one_process(pipeline, meshes, workers):
    job, cut = pipeline(2, 4), meshes(2)
    team, loaded = workers(2, (2, 2)), programs(job, cut)
    for worker, program in zip(team, loaded, strict=True):
        taken, given = install(worker, program)[f"update{worker.mesh}"]
        assert [one.shape for one in (*taken, *given)] == [(8, 8)] * 3
        place(worker, program, job)
    runtime = InProcessRuntime(cut)
    runtime.load(
        job.schedule,
        job.exported(cut),
        job.specs,
        outputs=job.outputs,
        carry=job.carry,
    )
    runtime.put(job.state())
    for number in range(3):
        results = step_all(team, loaded, job, number, "blocking")
        ((box, loss),) = results[1][0][job.outputs[0]]
        assert box == () and loss == runtime.step(job.batch(number))[job.outputs[0]]
        assert [len(trace) for _, trace, _ in results] == [
            len(program) for program in job.schedule.programs
        ]
    for index, name in enumerate(("w0", "w1")):
        tiles = team[index].fetch([30 + index])[30 + index]
        whole = np.asarray(runtime.fetch([name])[name])
        assert len(tiles) == 2  # cut over the model axis, replicas left out
        with pytest.raises(StepError, match=f"mesh {index} host 0 holds no array number"):
            team[index].fetch([20 + index])  # overwritten by the step that was given it
        for box, tile in tiles:
            np.testing.assert_array_equal(tile, whole[tuple(slice(a, b) for a, b in box)])


def test_a_worker_whose_peer_stays_silent_says_what_it_waited_for(pipeline, meshes, workers):
    job, cut = pipeline(2, 2), meshes(2, (1, 1))
    team, loaded = workers(2, (1, 1)), programs(job, cut, timeout=0.3)
    install(team[1], loaded[1])
    place(team[1], loaded[1], job)
    with pytest.raises(
        StepError,
        match=r"mesh 1, instruction 1 \(receive of microbatch 0 of h1@0 from mesh 0\) on host 0 "
        r"failed: .*waited 0.3 s for step 0: h1@0 from mesh 0 to mesh 1.* from mesh 0 host 0 and",
    ):
        team[1].step(work(team[1], loaded[1], job, 0))


def test_a_worker_whose_peer_goes_away_fails_at_once(pipeline, meshes, workers):
    job, cut = pipeline(2, 2), meshes(2, (1, 1))
    team, loaded = workers(2, (1, 1)), programs(job, cut)
    for worker, program in zip(team, loaded, strict=True):
        install(worker, program)
        place(worker, program, job)
    step_all(team, loaded, job, 0)
    team[0].close()
    with pytest.raises(StepError, match="from mesh 0 host 0, but its connection ended"):
        team[1].step(work(team[1], loaded[1], job, 1))


@pytest.mark.fault(
    "workers of other versions or another plan", "refused at the start, with both sides named"
)
def test_a_plan_that_is_not_loaded_is_refused_with_both_sides_named(pipeline, meshes, workers):
    job, cut = pipeline(2, 2), meshes(2, (1, 1))
    team, loaded = workers(2, (1, 1)), programs(job, cut, timeout=100.0)
    for worker, program in zip(team, loaded, strict=True):
        install(worker, program)
        place(worker, program, job)
    other = evolve(work(team[0], loaded[0], job, 0), plan="two")
    with pytest.raises(StepError, match="mesh 0 host 0 is asked for the plan two, but has .* one;"):
        team[0].step(other)
    install(team[0], evolve(loaded[0], plan="two"))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(team[0].step, other)
        with pytest.raises(StepError, match="is of plan one, but mesh 0 host 0 runs plan two"):
            team[1].step(work(team[1], loaded[1], job, 0))
        team[1].close()
        assert isinstance(sending.exception(), StepError)


def test_the_number_of_devices_must_be_that_of_the_mesh():
    grid = WorkerMesh(shape=(3,), axis_names=("x",), num_hosts=1)
    with pytest.raises(ValueError, match=r"mesh of shape \(3,\) needs 3 devices .* sees 2"):
        MeshWorker(0, 0, [grid], None, jax.devices()[:2])


@pytest.fixture
def gpu_team(meshes, monkeypatch):
    """Return two workers in threads of this process, whose GPUs have met."""
    fakes = pytest.importorskip("fake_gpus", reason="stands beside the tests of resharding")
    world = fakes.fake_cuda.World()
    for name, module in world.cupy().items():
        monkeypatch.setitem(sys.modules, name, module)
    gpus = fakes.Gpus(world)
    grids = [WorkerMesh(shape=(2, 2), axis_names=("data", "model"), num_hosts=1)] * 2
    made = [
        MeshWorker(index, 0, grids, None, list(mesh.devices.flat), gpu_transport=gpus)
        for index, mesh in enumerate(meshes(2))
    ]
    first, second = (device_numbers(grids, mesh) for mesh in (0, 1))
    (forth,), (back,) = (worker.gpu_identities(1) for worker in made)
    pairs = [(first, second, forth), (second, first, back)]
    for worker in made:
        with world.of(worker.name):
            worker.gpus.connect(pairs, device_owners(grids), 30.0)
    yield made, gpus
    for worker in made:
        worker.close()


def test_steps_between_gpus_are_those_of_one_process(pipeline, meshes, gpu_team):
    job, cut = pipeline(2, 4), meshes(2)
    workers, gpus = gpu_team
    loaded = programs(job, cut)
    for worker, program in zip(workers, loaded, strict=True):
        install(worker, program)
        place(worker, program, job)
    runtime = InProcessRuntime(cut)
    runtime.load(job.schedule, job.exported(cut), job.specs, outputs=job.outputs, carry=job.carry)
    runtime.put(job.state())
    for number in range(3):
        results = step_all(workers, loaded, job, number)
        ((_, loss),) = results[1][0][job.outputs[0]]
        assert loss == runtime.step(job.batch(number))[job.outputs[0]]
    assert [end.received for end in gpus.ends] == [12, 12]  # 3 steps of 4 microbatches, both ways
    for index, name in enumerate(("w0", "w1")):
        whole = np.asarray(runtime.fetch([name])[name])
        for box, tile in workers[index].fetch([30 + index])[30 + index]:
            np.testing.assert_array_equal(tile, whole[tuple(slice(a, b) for a, b in box)])


def test_a_worker_gets_the_list_of_its_own_mesh_alone(pipeline):
    schedule = pipeline().schedule
    for mesh, instructions in enumerate(schedule.programs):
        assert from_json(own_list(schedule, mesh), PipelineSchedule).programs == (instructions,)


def test_a_worker_says_how_much_jax_may_take_of_its_devices(workers, monkeypatch):
    (worker,) = workers(1, (2, 2))
    kind = type(jax.devices()[0])
    monkeypatch.setattr(kind, "memory_stats", lambda self: {"bytes_limit": 100 + self.id})
    assert worker.memory() == (100.0, jax.devices()[0].device_kind)
    monkeypatch.setattr(kind, "memory_stats", lambda self: None)
    assert worker.memory()[0] is None
