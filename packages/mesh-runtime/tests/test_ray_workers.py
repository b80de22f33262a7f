import os
import signal
from importlib.util import find_spec

import jax
import pytest

from alpa_interchange.schedule import PipelineSchedule
from mesh_runtime import RayMesh, RayOptions, RayWorkers, StepError, WorkerError
from mesh_runtime.worker_types import WorkerProgram, own_list

GRID = RayMesh(shape=(1,), axis_names=("x",))
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra mesh-runtime[ray]")


@pytest.fixture(scope="module")
def node():
    """Make a cluster of one node with one CPU, which says that it has two GPUs."""
    import ray

    ray.init(address="local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.ray
@needs_ray
def test_hosts_without_room_are_refused_with_what_is_asked_for_and_what_is_there(node):
    grid = RayMesh(shape=(1,), axis_names=("x",), num_cpus=2, num_gpus=1)
    with pytest.raises(
        WorkerError, match=r"no room within 1 s .* need \[\{'CPU': 2.0, 'GPU': 1.0\}\] .*'CPU': 1.0"
    ):
        RayWorkers([grid], RayOptions(start_timeout=1.0))


@pytest.mark.ray
@needs_ray
@pytest.mark.fault(
    "workers of other versions or another plan", "refused at the start, with both sides named"
)
def test_workers_of_another_version_are_refused_with_both_sides_named(node, tmp_path):
    folder = tmp_path / "mesh_runtime-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mesh-runtime\nVersion: 9.9\n")
    options = RayOptions(environment={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(
        WorkerError, match="mesh 0 host 0 has mesh-runtime 9.9, this process .*Install the same"
    ):
        RayWorkers([GRID], options)


@pytest.mark.ray
@needs_ray
@pytest.mark.fault(
    "workers of other versions or another plan", "refused at the start, with both sides named"
)
def test_workers_that_hold_different_plans_are_refused_before_a_step_with_both_plans_named(node):
    grid = RayMesh(shape=(1,), axis_names=("x",), num_cpus=0.5)
    workers = RayWorkers([grid, grid])
    nothing = PipelineSchedule(name="none", num_stages=2, num_microbatches=1, programs=((), ()))
    programs = [
        WorkerProgram(
            plan=plan, schedule=own_list(nothing, mesh), executables={}, layouts={}, timeout=60.0
        )
        for mesh, plan in enumerate(("one", "two"))
    ]
    workers.load("one", programs)
    with pytest.raises(
        StepError, match="mesh 1 host 0 is asked for the plan one, but has loaded two; load the"
    ):
        workers.route("one", {})
    with pytest.raises(RuntimeError, match="cannot be used any more: .* has loaded two"):
        workers.check_open()


@pytest.mark.ray
@needs_ray
def test_workers_end_with_the_last_reference_to_them_and_give_back_their_cpus(node, caplog):
    import ray

    with caplog.at_level("INFO", "mesh_runtime"):
        workers = RayWorkers([GRID])
    assert "through the memory of hosts: mesh 0 host 0 has cpu devices" in caplog.text
    assert list(workers.process_ids) == ["mesh 0 host 0"]
    assert workers.take_released() == ()
    del workers
    jax.clear_caches()
    RayWorkers([GRID], RayOptions(start_timeout=200.0)).close()  # there is one CPU
    assert ray.is_initialized()


@pytest.mark.ray
@needs_ray
def test_workers_of_one_machine_listen_where_no_other_machine_reaches_them(node):
    import ray

    resharding = pytest.importorskip("resharding", reason="its transport is handed to the workers")
    workers = RayWorkers([GRID], transport=resharding.HostTransport)
    (worker,) = workers.workers
    find = worker.actor.__ray_call__.remote(lambda actor: actor._transport.address.host)
    assert ray.get(find) == "127.0.0.1"
    workers.close()


@pytest.mark.ray
@needs_ray
def test_what_stands_by_takes_the_place_and_the_gpus_of_a_worker_that_failed(node):
    import ray

    grid = RayMesh(shape=(1,), axis_names=("x",), num_cpus=1, num_gpus=2)
    options = RayOptions(platform="cpu", heartbeat_timeout=60.0)
    first = RayWorkers([grid], options)
    first.prepare()
    (standing_by,) = first._processes.standing_by.values()
    first.prepare()  # is there already
    assert [*first._processes.standing_by.values()] == [standing_by]
    (pid,) = first.process_ids.values()
    in_reserve = ray.get(standing_by.process_id.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="mesh 0 host 0 died"):
        first.work("release", [(worker, ([],)) for worker in first.workers])
    first.retire()
    second = RayWorkers([grid], options, replacing=True, predecessor=first)
    assert second.process_ids == {"mesh 0 host 0": in_reserve}
    (worker,) = second.workers
    _, _, gpus = ray.get(worker.actor.introduce.remote(0, 0, b"", None, ""))
    assert gpus == "0,1"
    first.close()  # has nothing any more that it could end
    assert second.work("release", [(worker, ([],))]) == [(worker, None)]

    # one that has gone as well is not waited for: a process is started in the ordinary way
    second.prepare()
    (standing_by,) = second._processes.standing_by.values()
    os.kill(ray.get(standing_by.process_id.remote()), signal.SIGKILL)
    second.retire()
    third = RayWorkers([grid], options, replacing=True, predecessor=second)
    (last,) = third.process_ids.values()
    assert last not in (pid, in_reserve)
    third.close()


def test_no_mesh_and_unknown_choices_are_refused_before_anything_starts():
    with pytest.raises(ValueError, match="RayOptions.data_plane must be one of"):
        RayOptions(data_plane="carrier pigeon")
    with pytest.raises(ValueError, match="RayOptions.placement must be one of"):
        RayOptions(placement="anywhere")


@needs_ray
def test_no_mesh_is_refused():
    with pytest.raises(ValueError, match="at least one mesh, got none"):
        RayWorkers([])


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_extra_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mesh-runtime\[ray\]'"):
        RayWorkers([GRID])
