"""Meshes on a Ray cluster: one actor process per mesh host, each with its own JAX client.

The hosts of a mesh form one `jax.distributed` group of their own; meshes know nothing of each
other's clients, so a mesh can have any number of devices of any kind. Programs travel as
`jax.export` bytes, control as actor calls, and values between meshes over the data plane. When a
worker dies or a step takes too long, the runtime ends every process it started and says which
worker it was: nothing hangs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from alpa_interchange.check import non_negative, positive
from alpa_interchange.document import to_json
from alpa_interchange.schedule import PipelineSchedule
from mesh_runtime.boundary import check_present, complete_layouts, destinations, listing
from mesh_runtime.carry import check_outputs, with_carries
from mesh_runtime.data_plane import new_token
from mesh_runtime.order import ScheduleOrder, check_schedule
from mesh_runtime.pieces import Box
from mesh_runtime.runtime import Executable, StepError, ValueShardings, WorkerError
from mesh_runtime.task_programs import check_tasks
from mesh_runtime.trace import TRACE_MODES, TraceEvent
from mesh_runtime.worker import Spec, WorkerMesh, WorkerProgram, worker_name

DATA_PLANES = ("sockets", "object-store")
Tiles = dict[str, list[tuple[Box, NDArray[Any]]]]


@frozen(kw_only=True)
class RayMesh:
    """A mesh to make on the cluster: its grid of devices, spread evenly over `num_hosts` actors.

    `nodes`, one Ray node id per host, pins the actors; empty lets Ray place them.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    num_hosts: int = field(default=1, validator=positive)
    nodes: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if len(self.shape) != len(self.axis_names):
            raise ValueError(f"RayMesh needs a name per axis, got {self.shape}, {self.axis_names}")
        if self.num_devices % self.num_hosts:
            raise ValueError(
                f"RayMesh of {self.num_devices} devices cannot be spread evenly over "
                f"{self.num_hosts} hosts"
            )
        if self.nodes and len(self.nodes) != self.num_hosts:
            raise ValueError(
                f"RayMesh.nodes must name one node per host ({self.num_hosts}), got {self.nodes}"
            )

    @property
    def num_devices(self) -> int:
        return int(np.prod(self.shape))


@frozen(kw_only=True)
class RayOptions:
    """How workers are started and how long they may take."""

    platform: str = "cpu"  # of JAX in the workers
    cpus_per_host: float = field(default=0.0, validator=non_negative)  # Ray resource
    gpus_per_host: float = field(default=0.0, validator=non_negative)  # Ray resource
    environment: Mapping[str, str] = field(factory=dict)  # more variables for the workers
    start_timeout: float = field(default=180.0, validator=positive)  # seconds
    step_timeout: float = field(default=600.0, validator=positive)  # seconds, also for load
    address: str | None = None  # of the cluster; None: the running one, or a new local one
    data_plane: str = "sockets"  # or "object-store": slower, needs no connections between nodes
    trace: str = "none"

    def __attrs_post_init__(self) -> None:
        if self.data_plane not in DATA_PLANES:
            raise ValueError(
                f"RayOptions.data_plane must be one of {DATA_PLANES}, got {self.data_plane!r}"
            )
        if self.trace not in TRACE_MODES:
            raise ValueError(f"RayOptions.trace must be one of {TRACE_MODES}, got {self.trace!r}")


@frozen
class _Worker:
    mesh: int
    host: int
    actor: Any

    @property
    def name(self) -> str:
        return worker_name(self.mesh, self.host)


@frozen(kw_only=True)
class _Loaded:
    schedule: PipelineSchedule
    order: ScheduleOrder
    outputs: tuple[str, ...]


class RayRuntime:
    """Runs pipeline schedules on actors of a Ray cluster; follows `Runtime`.

    Arrays come in and go out as numpy arrays. After a failure the runtime is closed and its state
    is lost: make a new one and restore from a checkpoint.
    """

    def __init__(self, meshes: Sequence[RayMesh], options: RayOptions | None = None) -> None:
        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        try:
            import ray
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "RayRuntime needs Ray: pip install 'mesh-runtime[ray]'"
            ) from None

        if not meshes:
            raise ValueError("RayRuntime needs at least one mesh, got none")
        self.meshes, self.options = tuple(meshes), options or RayOptions()
        self._ray: Any = ray
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            ray.init(address=self.options.address, include_dashboard=False, log_to_driver=False)
        self._workers: list[_Worker] = []
        self._closed = ""
        self._loaded: _Loaded | None = None
        self._resident: set[tuple[int, str]] = set()
        self._number = 0
        self._trace: tuple[TraceEvent, ...] = ()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def trace(self) -> tuple[TraceEvent, ...]:
        """The events of the last step by the workers' clocks; empty without a trace mode."""
        return self._trace

    @property
    def process_ids(self) -> dict[str, int]:
        """The process of every worker, by its name ("mesh 0 host 1")."""
        return dict(self._call_all("process_id", [()] * len(self._workers)))

    def load(
        self,
        schedule: PipelineSchedule,
        executables: Mapping[str, Executable],
        shardings: ValueShardings,
        *,
        outputs: Iterable[str] = (),
        carry: Mapping[str, str] | None = None,
        donated: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Check a schedule and ship it with its exported programs; see `Runtime.load`."""
        for label, given in (
            ("the schedule has programs", schedule.programs),
            ("shardings", shardings),
        ):
            if len(given) != len(self.meshes):
                raise ValueError(
                    f"{label} for {len(given)} meshes, but the runtime was made with "
                    f"{len(self.meshes)}"
                )
        callables = sorted(
            name for name, made in executables.items() if not isinstance(made, bytes)
        )
        if callables:
            raise TypeError(
                f"RayRuntime runs programs in other processes, but the executables of "
                f"{listing(callables)} are no bytes; serialise them with jax.export"
            )
        exported = {name: made for name, made in executables.items() if isinstance(made, bytes)}
        outputs, carry, donated = tuple(outputs), dict(carry or {}), donated or {}
        order = check_schedule(schedule)
        check_outputs(order, outputs, carry)
        check_tasks(schedule.programs, executables)
        schedule = with_carries(schedule, order, carry)
        order = check_schedule(schedule)
        layouts = complete_layouts(schedule, order, shardings, carry)
        specs = tuple(
            {value: _plain_spec(mesh, value, spec) for value, spec in mapping.items()}
            for mesh, mapping in enumerate(layouts)
        )
        programs = []
        for mesh, instructions in enumerate(schedule.programs):
            tasks = {each.task for each in instructions if each.kind == "run"}
            programs.append(
                WorkerProgram(
                    schedule=to_json(schedule),
                    executables={task: exported[task] for task in sorted(tasks)},
                    specs=specs,
                    inputs=order.inputs[mesh],
                    outputs=tuple(name for name in outputs if _first_holder(order, name) == mesh),
                    carry={a: b for a, b in carry.items() if b in order.inputs[mesh]},
                    donated={task: tuple(donated[task]) for task in tasks if task in donated},
                    trace=self.options.trace,
                    timeout=self.options.step_timeout,
                )
            )
        self._call_all("load", [(programs[worker.mesh],) for worker in self._workers])
        self._loaded = _Loaded(schedule=schedule, order=order, outputs=outputs)

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Make `inputs` resident on every mesh that reads them before it writes them."""
        loaded = self._program()
        placed = destinations(loaded.order, inputs, "put")
        self._call_all("put", self._arguments(placed, inputs))
        self._resident.update(placed)

    def step(self, batch: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Execute the schedule once on every worker; return the outputs as numpy arrays."""
        loaded = self._program()
        placed = destinations(loaded.order, batch, "step")
        for mesh, names in enumerate(loaded.order.inputs):
            held = {name for at, name in (*placed, *self._resident) if at == mesh}
            check_present(mesh, names, held)
        self._number += 1
        origin = time.time()
        arguments = self._arguments(placed, batch)
        results = self._call_all("step", [(self._number, *given) for given in arguments])
        tiles: Tiles = {}
        events = []
        for worker, (_, (given, trace)) in zip(self._workers, results, strict=True):
            for name, parts in given.items():
                tiles.setdefault(name, []).extend(parts)
            if worker.host == 0:
                program = loaded.schedule.programs[worker.mesh]
                events += [
                    TraceEvent(worker.mesh, program[k], start - origin, stop - origin)
                    for k, start, stop in trace
                ]
        self._trace = tuple(sorted(events, key=lambda event: (event.start, event.stop)))
        return {name: _whole(tiles[name]) for name in loaded.outputs}

    def fetch(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Return resident buffers as whole numpy arrays."""
        wanted = list(names)
        found: dict[str, Tiles] = {}
        for worker, (_, given) in zip(
            self._workers, self._call_all("fetch", [(wanted,)] * len(self._workers)), strict=True
        ):
            for name, parts in given.items():
                found.setdefault(name, {}).setdefault(str(worker.mesh), []).extend(parts)
        for name in wanted:
            if name not in found:
                raise KeyError(f"no mesh holds buffer {name!r}")
        return {name: _whole(next(iter(found[name].values()))) for name in wanted}

    def close(self) -> None:
        """End every process of the runtime, and the Ray instance if it was started here."""
        self._closed = self._closed or "it was closed"
        for worker in self._workers:
            self._ray.kill(worker.actor, no_restart=True)
        self._workers = []
        if self._started_ray:
            self._ray.shutdown()
            self._started_ray = False

    def _program(self) -> _Loaded:
        if self._closed:
            raise RuntimeError(f"this runtime cannot be used any more: {self._closed}")
        if self._loaded is None:
            raise RuntimeError("no schedule is loaded; call load() first")
        return self._loaded

    def _start(self) -> None:
        """Start one actor per mesh host, join each mesh's group, and introduce all."""
        from mesh_runtime.ray_worker import ActorWorker

        actor_class = self._ray.remote(concurrency_groups={"data": 1})(ActorWorker)
        plane = self.options.data_plane
        token = new_token()
        for mesh, wanted in enumerate(self.meshes):
            for host in range(wanted.num_hosts):
                options = self._actor_options(wanted, host)
                actor = actor_class.options(**options).remote(mesh, host, token, plane)
                self._workers.append(_Worker(mesh, host, actor))
        grids = tuple(
            WorkerMesh(shape=each.shape, axis_names=each.axis_names, num_hosts=each.num_hosts)
            for each in self.meshes
        )
        timeout = self.options.start_timeout
        ports = self._call_all("free_address", [()] * len(self._workers), timeout)
        coordinators = {
            worker.mesh: address
            for worker, (_, address) in zip(self._workers, ports, strict=True)
            if worker.host == 0
        }
        joined = self._call_all(
            "join", [(grids, coordinators[worker.mesh]) for worker in self._workers], timeout
        )
        addresses = dict(joined)
        if plane == "object-store":
            addresses = {worker.name: worker.actor for worker in self._workers}
        self._call_all("connect", [(addresses,)] * len(self._workers), timeout)

    def _actor_options(self, mesh: RayMesh, host: int) -> dict[str, Any]:
        per_host = mesh.num_devices // mesh.num_hosts
        variables = {
            "JAX_PLATFORMS": self.options.platform,
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            **self.options.environment,
        }
        if self.options.platform == "cpu":
            flags = variables.get("XLA_FLAGS", "")
            count = f"--xla_force_host_platform_device_count={per_host}"
            variables["XLA_FLAGS"] = f"{flags} {count}".strip()
        options: dict[str, Any] = {
            "num_cpus": self.options.cpus_per_host,
            "num_gpus": self.options.gpus_per_host,
            "max_restarts": 0,
            "runtime_env": {"env_vars": variables},
        }
        if mesh.nodes:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                node_id=mesh.nodes[host], soft=False
            )
        return options

    def _arguments(
        self, placed: Sequence[tuple[int, str]], arrays: Mapping[str, Any]
    ) -> list[tuple[dict[str, Any]]]:
        """Return each worker's share of whole arrays; every array is put into the store once."""
        stored = {name: np.asarray(arrays[name]) for name in dict.fromkeys(n for _, n in placed)}
        return [
            ({name: stored[name] for mesh, name in placed if mesh == worker.mesh},)
            for worker in self._workers
        ]

    def _call_all(
        self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float | None = None
    ) -> list[tuple[str, Any]]:
        """Return (worker name, result) of a call to all workers; end everything if one fails."""
        if self._closed:
            raise RuntimeError(f"this runtime cannot be used any more: {self._closed}")
        timeout = self.options.step_timeout if timeout is None else timeout
        pending = {
            getattr(worker.actor, method).remote(*given): worker
            for worker, given in zip(self._workers, arguments, strict=True)
        }
        references, results = list(pending), {}
        deadline = time.monotonic() + timeout
        while pending:
            left = deadline - time.monotonic()
            done, _ = self._ray.wait(list(pending), num_returns=1, timeout=max(0.0, left))
            if not done:
                late = ", ".join(worker.name for worker in pending.values())
                self._fail(WorkerError(f"{method}: no answer from {late} within {timeout:g} s"))
            for reference in done:
                worker = pending.pop(reference)
                try:
                    results[reference] = (worker.name, self._ray.get(reference))
                except Exception as error:
                    self._fail(self._culprit(method, worker, error, pending))
        return [results[reference] for reference in references]

    def _culprit(
        self, method: str, worker: _Worker, error: Exception, pending: Mapping[Any, _Worker]
    ) -> StepError:
        """Return the error to raise: a death is the cause of what others see a bit later."""
        failures = [(worker, error)]
        others = list(pending)
        if others:
            others, _ = self._ray.wait(others, num_returns=len(others), timeout=2.0)
        for reference in others:
            try:
                self._ray.get(reference)
            except Exception as other:
                failures.append((pending[reference], other))
        for where, what in failures:
            if not isinstance(what, self._ray.exceptions.RayTaskError):
                return WorkerError(
                    f"the worker of {where.name} died during {method}: {str(what).splitlines()[0]}"
                )
        cause = getattr(error, "cause", None) or error
        return StepError(f"{method} failed on {worker.name}: {cause}")

    def _fail(self, error: StepError) -> None:
        """Close the runtime and raise `error`."""
        self._closed = str(error)
        self.close()
        raise error


def _plain_spec(mesh: int, value: str, spec: NamedSharding | PartitionSpec) -> Spec:
    """Return the entries of a layout as plain data."""
    entries = spec.spec if isinstance(spec, NamedSharding) else spec
    plain: list[None | str | tuple[str, ...]] = []
    for entry in entries:
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(f"shardings[{mesh}][{value!r}] leaves a dim unconstrained: {spec}")
        plain.append(tuple(entry) if isinstance(entry, tuple | list) else entry)
    return tuple(plain)


def _first_holder(order: ScheduleOrder, name: str) -> int:
    return next(mesh for mesh, names in enumerate(order.remaining) if name in names)


def _whole(tiles: Sequence[tuple[Box, NDArray[Any]]]) -> NDArray[Any]:
    """Return the array that `tiles` cut up."""
    if not tiles[0][0]:
        return tiles[0][1]
    shape = tuple(max(box[dim][1] for box, _ in tiles) for dim in range(len(tiles[0][0])))
    whole = np.empty(shape, tiles[0][1].dtype)
    for box, array in tiles:
        whole[tuple(slice(start, stop) for start, stop in box)] = array
    return whole
