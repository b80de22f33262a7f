"""Processes on a Ray cluster, one per mesh host, each with its own JAX client, and their arrays.

The hosts of a mesh form one `jax.distributed` group of their own; meshes know nothing of each
other's clients, so a mesh can have any number of devices of any kind. When a worker dies or a call
takes too long, all processes that were started here are ended, and the error says which worker it
was: nothing hangs.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from numpy.typing import NDArray

from mesh_runtime.driver_memory import DriverMemory, can_share
from mesh_runtime.gpu_plane import GpuPair, GpuTransportMaker
from mesh_runtime.handshake import disagreement
from mesh_runtime.heartbeats import Heartbeats, Progress
from mesh_runtime.host_batches import HostBatches
from mesh_runtime.layout import Tiles, whole_of
from mesh_runtime.ray_connection import connect
from mesh_runtime.ray_options import RayOptions
from mesh_runtime.ray_placement import RayMesh, bundles_of, reserve
from mesh_runtime.ray_processes import Processes
from mesh_runtime.remote_array import Buffer
from mesh_runtime.runtime import StepError, WorkerError
from mesh_runtime.transfers import Moves, TransportMaker, device_numbers, device_owners
from mesh_runtime.worker_mesh import WorkerMesh, worker_name
from mesh_runtime.worker_types import TaskTypes, WorkerProgram

_REPEAT_SECONDS = 3.0
"""After which a call is sent again to a worker that is idle. Ray does so by itself, but later: 30
steps take 60 s with this and 78 s without where a fifth of all calls and answers get lost."""
_ALONE = ("load", "unload", "place", "add_batches")
"""What workers do without one another: where one refuses, all are as they were."""

_STANDBY_SECONDS = 5.0
"""Within which what stands by must answer to take a failed worker's place, before others are
started in the ordinary way: an idle process answers within 0.1 s."""
_LOOPBACK = "127.0.0.1"
_LOG = logging.getLogger("mesh_runtime")


@frozen
class Worker:
    """An actor, and which host of which mesh it is."""

    mesh: int
    host: int
    actor: Any

    @property
    def name(self) -> str:
        """What errors call it."""
        return worker_name(self.mesh, self.host)


class RayWorkers:
    """The actors of some meshes; several runtimes may load their programs on them.

    Where they are `replacing` others that failed, room is waited for no longer than
    `replace_timeout`; what stands by of a `predecessor` with the same meshes is used (`prepare`).
    They end with `close`, with this process, or when neither a runtime nor an array refers to them.
    `transport` makes what carries values between them; without, meshes cannot exchange any.
    `gpu_transport` makes what is used in its place where all workers have GPUs that it can serve.
    """

    def __init__(
        self,
        meshes: Sequence[RayMesh],
        options: RayOptions | None = None,
        *,
        replacing: bool = False,
        predecessor: RayWorkers | None = None,
        transport: TransportMaker | None = None,
        gpu_transport: GpuTransportMaker | None = None,
    ) -> None:
        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        try:
            import ray
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "meshes on Ray need Ray: pip install 'mesh-runtime[ray]'"
            ) from None

        if not meshes:
            raise ValueError("RayWorkers needs at least one mesh, got none")
        self.meshes, self.options = tuple(meshes), options or RayOptions()
        self.grids = tuple(
            WorkerMesh(shape=each.shape, axis_names=each.axis_names, num_hosts=each.num_hosts)
            for each in self.meshes
        )
        self.ray: Any = ray
        self.transport = transport
        self.between_gpus = False
        self.memory: DriverMemory | None = None  # for what workers are sent, if all can map it
        self._connected: set[tuple[int, int]] = set()  # meshes between whose GPUs values may go
        self.closed = ""
        self.workers: list[Worker] = []
        self._numbers = itertools.count(1)
        self._work = itertools.count(1)
        self._released: deque[int] = deque()
        self._plans: Counter[str] = Counter()
        self._batches: dict[HostBatches, int] = {}
        stood_by: Processes | None = None
        if predecessor is not None and predecessor.meshes == self.meshes:
            stood_by = predecessor._processes.successor(_STANDBY_SECONDS)
        if stood_by is None or not self._replaced_by(stood_by):
            self._begin(self._set_aside(replacing, gpu_transport))

    def _replaced_by(self, stood_by: Processes) -> bool:
        """Return whether what stood by begins: one may have died while it was being started, which
        nobody is told before it is called."""
        try:
            self._begin(stood_by)
        except WorkerError:
            return False
        return True

    def _begin(self, processes: Processes) -> None:
        """Start the workers; what was started is ended where one fails."""
        self._processes, self.closed = processes, ""
        self._end = weakref.finalize(self, _end, processes, self.workers)
        try:
            self._start()
        except BaseException as error:
            self.close(str(error))
            raise

    def _set_aside(self, replacing: bool, gpu_transport: GpuTransportMaker | None) -> Processes:
        """Return the places of the processes on the cluster."""
        options = self.options
        bundles, places = bundles_of(self.meshes)
        cpus = sum(one["CPU"] for one in bundles)
        started = connect(self.ray, options.address, cpus, options.start_timeout)
        made = Processes(
            self.ray, self.meshes, options, self.transport, gpu_transport, places, started
        )
        seconds = options.replace_timeout if replacing else options.start_timeout
        try:
            made.groups.append(reserve(self.ray, bundles, options.placement, seconds))
        except BaseException:
            made.end()
            raise
        return made

    @property
    def process_ids(self) -> dict[str, int]:
        """The process of every worker, by its name ("mesh 0 host 1")."""
        return dict(self._call("process_id", [(worker, ()) for worker in self.workers]))

    @property
    def hosts(self) -> list[Sequence[int]]:
        """The host of every worker, by mesh: as the meshes number them, if all do."""
        if all(mesh.hosts for mesh in self.meshes):
            return [mesh.hosts for mesh in self.meshes]
        return [*self._processes.places]

    def prepare(self) -> None:
        """Have a process stand by for each, for workers of which these are the predecessor."""
        if self.options.stand_by:
            self._processes.prepare()

    def retire(self) -> None:
        """End every process but those that stand by."""
        self.closed = self.closed or "its workers were replaced"
        self.workers.clear()
        self._processes.end_actors()

    def close(self, reason: str = "it was closed") -> None:
        """End every process, and the Ray instance if it was started here."""
        self.closed = self.closed or reason
        self._end()

    def check_open(self) -> None:
        """Refuse to go on with workers that are closed."""
        if self.closed:
            raise RuntimeError(f"this runtime cannot be used any more: {self.closed}")

    def new_number(self) -> int:
        """Return a number for an array."""
        return next(self._numbers)

    def release(self, number: int) -> None:
        """Note that nobody refers to an array any more; the workers hear of it later."""
        self._released.append(number)

    def take_released(self) -> tuple[int, ...]:
        """Return the numbers released since the last call."""
        return tuple(self._released.popleft() for _ in range(len(self._released)))

    def fetch(self, buffers: Sequence[Buffer]) -> list[NDArray[Any]]:
        """Return arrays whole on the host, asking each mesh once."""
        by_mesh: dict[int, list[int]] = {}
        for buffer in buffers:
            by_mesh.setdefault(buffer.meshes[0], []).append(buffer.number)
        found: dict[int, Tiles] = {}
        for _, given in self.work(
            "fetch",
            [
                (worker, (by_mesh[worker.mesh],))
                for worker in self.workers
                if worker.mesh in by_mesh
            ],
        ):
            for number, parts in given.items():
                found.setdefault(number, []).extend(parts)
        return [whole_of(found[buffer.number]) for buffer in buffers]

    def work(
        self, method: str, calls: Sequence[tuple[Worker, tuple[Any, ...]]]
    ) -> list[tuple[Worker, Any]]:
        """Return (worker, result) of a method of several `MeshWorker`s."""
        number = next(self._work)
        results = self._call(
            "work", [(worker, (number, method, *given)) for worker, given in calls], method
        )
        return [(worker, result) for (worker, _), (_, result) in zip(calls, results, strict=True)]

    def load(self, plan: str, programs: Sequence[WorkerProgram]) -> TaskTypes:
        """Install each mesh's program of a plan; return what its tasks take and give."""
        answers = self.work("load", [(worker, (programs[worker.mesh],)) for worker in self.workers])
        self._plans[plan] += 1
        return {task: types for _, found in answers for task, types in found.items()}

    def route(self, plan: str, moves: Moves) -> None:
        """Tell by which plans the values of a loaded plan come and go."""
        pairs = self._new_pairs(moves) if self.between_gpus else []
        own = [
            {key: move for key, move in moves.items() if mesh in key[1:]}
            for mesh in range(len(self.grids))
        ]
        self.work("route", [(one, (plan, own[one.mesh], pairs)) for one in self.workers])

    def _new_pairs(self, moves: Moves) -> list[GpuPair]:
        """Return the pairs of meshes whose GPUs have yet to meet, in an order."""
        ends = sorted({(source, target) for _, source, target in moves} - self._connected)
        asked = Counter(source for source, _ in ends)
        given = [(one, (asked[one.mesh],)) for one in self.workers if one.host == 0]
        made = self.work("gpu_identities", [each for each in given if each[1][0]])
        names = {worker.mesh: list(found) for worker, found in made}
        self._connected.update(ends)
        devices = [device_numbers(self.grids, mesh) for mesh in range(len(self.grids))]
        return [(devices[a], devices[b], names[a].pop()) for a, b in ends]

    def unload(self, plan: str) -> None:
        """Drop a plan, once for each time that it was loaded."""
        self._plans[plan] -= 1
        if not self._plans[plan] and not self.closed:
            self.work("unload", [(worker, (plan,)) for worker in self.workers])

    def number_of(self, batches: HostBatches) -> int:
        """Return the number under which the workers read batches, having told them how."""
        if batches not in self._batches:
            number = len(self._batches)
            given = (number, batches.read, batches.shapes)
            try:
                self.work("add_batches", [(worker, given) for worker in self.workers])
            except StepError as error:
                if self.closed:
                    raise
                raise StepError(
                    f"what reads the batches, {batches.read!r}, is no good on the workers: its "
                    f"module must be one that they can import, and its data must be small: {error}"
                ) from error
            self._batches[batches] = number
        return self._batches[batches]

    def _start(self) -> None:
        """Start one actor per mesh host, join each mesh's group, and introduce all."""
        token, processes = secrets.token_bytes(32), self._processes
        processes.start()
        found = processes.actors.items()
        self.workers += [Worker(mesh, host, actor) for (mesh, host), actor in found]
        self.workers.sort(key=lambda one: (one.mesh, one.host))
        timeout = self.options.start_timeout
        nodes = dict(self._call("node_address", [(one, ()) for one in self.workers], None, timeout))
        alone = len(set(nodes.values())) == 1  # then nobody else needs to reach them
        given = {
            one.name: (
                *(one.mesh, one.host, token, processes.gpus.get((one.mesh, one.host))),
                _LOOPBACK if alone else nodes[one.name],
            )
            for one in self.workers
        }
        met = dict(
            self._call("introduce", [(one, given[one.name]) for one in self.workers], None, timeout)
        )
        wrong = disagreement({name: versions for name, (versions, *_) in met.items()})
        if wrong is not None:
            raise WorkerError(wrong)
        processes.gpus.update(
            ((one.mesh, one.host), gpus)
            for one in self.workers
            for gpus in met[one.name][2:]
            if self.meshes[one.mesh].num_gpus and gpus is not None
        )
        coordinators = {each.mesh: met[each.name][1] for each in self.workers if each.host == 0}
        addresses = dict(
            self._call(
                "join",
                [(each, (self.grids, coordinators[each.mesh])) for each in self.workers],
                None,
                timeout,
            )
        )
        if self.options.data_plane == "object-store":
            addresses = {worker.name: worker.actor for worker in self.workers}
        owners = device_owners(self.grids)
        known = [(each, (addresses, owners)) for each in self.workers]
        self._call("connect", known, None, timeout)
        obstacle = self._gpu_obstacle()
        self.between_gpus = not obstacle
        way = f"through the memory of hosts: {obstacle}" if obstacle else "from GPU to GPU"
        _LOG.info("values go from mesh to mesh %s", way)
        if alone and can_share():
            memory = DriverMemory()
            probe = memory.probe()
            if all(found for _, found in self.work("reaches", [(w, probe) for w in self.workers])):
                self.memory = memory

    def _gpu_obstacle(self) -> str:
        """Return why values do not go from GPU to GPU; "" if they do."""
        if self.options.data_plane != "auto":
            return f"RayOptions.data_plane is {self.options.data_plane!r}"
        if self.options.checksum:
            return "RayOptions.checksum is set"
        found = self.work("gpu_obstacle", [(worker, ()) for worker in self.workers])
        return next((reason for _, reason in found if reason), "")

    def _call(
        self,
        method: str,
        calls: Sequence[tuple[Worker, tuple[Any, ...]]],
        what: str | None = None,
        timeout: float | None = None,
    ) -> list[tuple[str, Any]]:
        """Return (worker name, result) of calls, side by side; end everything if one fails."""
        self.check_open()
        what = what or method
        timeout = self.options.step_timeout if timeout is None else timeout
        pending = {getattr(worker.actor, method).remote(*given): worker for worker, given in calls}
        results: dict[str, Any] = {}
        refused: dict[str, StepError] = {}
        begun = time.monotonic()
        deadline, sent = begun + timeout, {worker.name: begun for worker, _ in calls}
        # a process that starts answers nothing until it has imported jax
        heartbeats = self._heartbeats([worker for worker, _ in calls if method == "work"])
        while len(results) + len(refused) < len(calls):
            for worker, given in calls if heartbeats.names else ():
                if worker.name not in results and worker.name not in refused:
                    pending.update(self._repeated(worker, given, sent, heartbeats))
            asked = heartbeats.references()
            left = min(deadline - time.monotonic(), heartbeats.seconds_left())
            done, _ = self.ray.wait([*pending, *asked], num_returns=1, timeout=max(0.0, left))
            if time.monotonic() > deadline:
                late = heartbeats.culprits([worker.name for worker in pending.values()])
                self._fail(heartbeats.no_answer(what, late, f"within {timeout:g} s"))
            if not done and (silent := heartbeats.late()):
                after = f"nor a heartbeat for {heartbeats.timeout:g} s"
                self._fail(heartbeats.no_answer(what, silent, after))
            for reference in done:
                if heartbeats.answered(reference, self.ray.get):
                    if stalled := heartbeats.stalled():
                        self._fail(WorkerError(f"{what}: {stalled}"))
                    continue
                worker = pending.pop(reference)
                try:
                    results[worker.name] = self.ray.get(reference)
                except Exception as error:
                    if what not in _ALONE or not self._is_refusal(error):
                        self._fail(self._culprit(what, worker, error, pending))
                    text = f"{what} failed on {worker.name}: {_cause(error)}"
                    refused[worker.name] = StepError(text)
        if refused:
            raise next(iter(refused.values()))
        return [(worker.name, results[worker.name]) for worker, _ in calls]

    def _repeated(
        self,
        worker: Worker,
        given: tuple[Any, ...],
        sent: dict[str, float],
        heartbeats: Heartbeats,
    ) -> dict[Any, Worker]:
        """Return the reference of a call sent again, if the worker seems not to have got it or its
        answer was lost; `sent` says when calls were sent."""
        if not heartbeats.idle_after(worker.name, sent[worker.name] + _REPEAT_SECONDS):
            return {}
        sent[worker.name] = time.monotonic()
        return {worker.actor.work.remote(*given): worker}

    def _heartbeats(self, workers: Sequence[Worker]) -> Heartbeats:
        actors = {worker.name: worker.actor for worker in workers}

        def ask(name: str) -> Any:
            return actors[name].progress.options(concurrency_group="heartbeat").remote()

        options = self.options
        return Heartbeats(list(actors), ask, options.heartbeat_seconds, options.heartbeat_timeout)

    def progress(self) -> dict[str, Progress]:
        """Return what every worker is doing, by its name, beside a step that runs; those that do
        not answer within a heartbeat's time are left out."""
        heartbeats = self._heartbeats(self.workers)
        asked = {heartbeats.ask(worker.name): worker.name for worker in self.workers}
        done, _ = self.ray.wait(
            list(asked), num_returns=len(asked), timeout=self.options.heartbeat_timeout
        )
        return {asked[reference]: self.ray.get(reference) for reference in done}

    def _culprit(
        self, what: str, worker: Worker, error: Exception, pending: Mapping[Any, Worker]
    ) -> StepError:
        """Return the error to raise: a death, or a failed run, is the cause of what
        others see a bit later."""
        failures = [(worker, error)]
        others = list(pending)
        if others:
            others, _ = self.ray.wait(others, num_returns=len(others), timeout=2.0)
        for reference in others:
            try:
                self.ray.get(reference)
            except Exception as other:
                failures.append((pending[reference], other))
        for where, found in failures:
            if not self._is_refusal(found):
                return WorkerError(
                    f"the worker of {where.name} died during {what}: {str(found).splitlines()[0]}"
                )
        # A mesh that waits for a value may hear that there is none before the run that was to make
        # it is found to have failed, as host devices without memory fail after a run was issued.
        where, found = min(failures, key=lambda one: "(receive " in str(_cause(one[1])))
        return StepError(f"{what} failed on {where.name}: {_cause(found)}")

    def _is_refusal(self, error: Exception) -> bool:
        """Return whether a worker that lives raised an error."""
        return isinstance(error, self.ray.exceptions.RayTaskError)

    def _fail(self, error: StepError) -> None:
        """End the workers, but not what stands by for them, and raise `error`."""
        self.closed = self.closed or str(error)
        if self._processes.standing_by:
            self.retire()
        else:
            self.close()
        raise error


def _cause(error: Exception) -> Any:
    return getattr(error, "cause", None) or error


def _end(processes: Processes, workers: list[Worker]) -> None:
    """End all processes, also those that stand by."""
    workers.clear()
    processes.end()
