"""The meshes of a plan on a Ray cluster: one process per host of each mesh.

A host of the cluster description becomes a bundle of a placement group, so meshes that share a host
share a node; an actor asks for the GPUs its mesh has on that host.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_interchange import (
    ClusterSpec,
    DeviceMesh,
    ParallelPlan,
    ReshardingPlan,
    ReshardingTask,
)
from alpa_meta.errors import PlanError
from alpa_meta.execution.compiled_task import AnyMesh, CompiledTask
from alpa_meta.execution.exported_function import exported
from alpa_meta.execution.meshes import check_memory
from alpa_meta.inter_op.meshes import host_of
from alpa_meta.spmd import abstract_mesh
from alpa_meta.types import Function
from mesh_runtime import Executable as Program
from mesh_runtime import (
    RayMesh,
    RayOptions,
    RayRuntime,
    RayWorkers,
    Runtime,
    WorkerError,
    check_reachable,
)
from resharding import HostTransport
from resharding import plan as plan_resharding
from resharding.gpu_transport import GpuTransport
from resharding.network import network_of

_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu"}


class RayPool:
    """The workers that the plans of one step run on: those with equal meshes share them."""

    def __init__(self, options: RayOptions) -> None:
        self.options = options
        self._replacing = False
        self._workers: dict[tuple[RayMesh, ...], RayWorkers] = {}
        self._retired: dict[tuple[RayMesh, ...], RayWorkers] = {}

    def check_reachable(self) -> None:
        """Refuse an address where no cluster answers, before a plan is made for it."""
        if self._workers:
            return
        try:
            check_reachable(self.options.address)
        except WorkerError as error:
            raise PlanError(f"no workers for the plan on Ray: {error}") from error

    def workers(self, meshes: tuple[RayMesh, ...]) -> RayWorkers:
        """Return running workers for meshes; after a failure, new ones."""
        found = self._workers.get(meshes)
        if found is None or found.closed:
            predecessor = self._retired.pop(meshes, None)
            if predecessor is None:
                self._end_retired()  # other meshes have what these may need
            try:
                found = self._workers[meshes] = RayWorkers(
                    meshes,
                    self.options,
                    transport=HostTransport,
                    gpu_transport=GpuTransport,
                    replacing=self._replacing,
                    predecessor=predecessor,
                )
            except WorkerError as error:
                if self._replacing:
                    raise
                raise PlanError(f"no workers for the plan on Ray: {error}") from error
        return found

    def prepare(self) -> None:
        """Have a process stand by for every worker."""
        for workers in self._workers.values():
            if not workers.closed:
                workers.prepare()

    def replace(self) -> None:
        """End all workers; others are made when they are asked for, of what stands by."""
        self._end_retired()
        self._retired, self._workers, self._replacing = self._workers, {}, True
        for workers in self._retired.values():
            workers.retire()

    def close(self) -> None:
        """End all workers; their arrays are lost."""
        self._end_retired()
        for workers in self._workers.values():
            workers.close()
        self._workers.clear()

    def _end_retired(self) -> None:
        for workers in self._retired.values():
            workers.close()
        self._retired.clear()


class RayMeshes:
    """The meshes of a plan as workers of a Ray cluster."""

    def __init__(self, plan: ParallelPlan, pool: RayPool, trace: str) -> None:
        self.stages: tuple[AnyMesh, ...] = tuple(
            abstract_mesh(sharding.mesh.logical) for sharding in plan.shardings
        )
        self._platforms = tuple(
            _platform(plan.cluster, sharding.mesh, pool.options) for sharding in plan.shardings
        )
        meshes = tuple(
            ray_mesh(plan.cluster, sharding.mesh, platform, pool.options)
            for sharding, platform in zip(
                plan.shardings[: plan.stage_plan.num_meshes], self._platforms, strict=False
            )
        )
        workers = pool.workers(meshes)
        check_memory(plan, _memory(workers))
        self.runtime: Runtime = RayRuntime(workers, planner=planner_for(plan.cluster), trace=trace)

    def platform(self, stage: int) -> str | None:
        """Return "cpu" or "gpu"."""
        return self._platforms[stage]

    def task(self, compiled: CompiledTask, held: Mapping[str, NamedSharding]) -> Program:
        """Return the task exported; it brings operands laid out otherwise into its layouts."""
        spec = compiled.task.spec
        return exported(
            compiled.run,
            compiled.arguments(),
            *compiled.shardings(),
            self._platforms[spec.stage],
            donated=tuple(spec.inputs[k] for k in compiled.donated),
            options=compiled.options,
        )

    def function(
        self,
        function: Function[Sequence[jax.Array]],
        arguments: Sequence[jax.ShapeDtypeStruct],
        in_shardings: Sequence[NamedSharding] | None,
        out_shardings: Sequence[NamedSharding],
        stage: int,
    ) -> Program:
        """Return the function exported."""
        whole = NamedSharding(self.stages[stage], PartitionSpec())
        places = [whole] * len(arguments) if in_shardings is None else in_shardings
        return exported(function, arguments, places, out_shardings, self._platforms[stage])


def planner_for(cluster: ClusterSpec) -> Callable[[ReshardingTask], ReshardingPlan]:
    """Return what plans the transfers between meshes on a cluster; workers run them all at once."""
    network = network_of(cluster, issue="none")
    return functools.cache(lambda task: plan_resharding(task, network))


def ray_mesh(cluster: ClusterSpec, mesh: DeviceMesh, platform: str, options: RayOptions) -> RayMesh:
    """Return where a mesh of a plan stands: on which hosts of the cluster, with how many GPUs."""
    hosts = [host_of(cluster, device)[0] for device in mesh.device_ids]
    runs = [(host, len(list(members))) for host, members in itertools.groupby(hosts)]
    names, counts = [host for host, _ in runs], {count for _, count in runs}
    if len(set(names)) != len(names) or len(counts) != 1:
        raise PlanError(
            f"a mesh on Ray takes its devices host by host, as many of each, but the plan's mesh "
            f"{mesh.logical.shape} has devices of hosts {hosts} in that order; plan again with "
            "runtime='ray'"
        )
    return RayMesh(
        shape=mesh.logical.shape,
        axis_names=mesh.logical.axis_names,
        num_hosts=len(names),
        hosts=tuple(names),
        num_cpus=options.cpus_per_actor,
        num_gpus=counts.pop() if platform == "gpu" else 0,
    )


def _memory(workers: RayWorkers) -> list[tuple[float | None, str]]:
    """Return for each mesh the least bytes that jax may take of a device, and what devices they
    are."""
    found: dict[int, list[tuple[float | None, str]]] = {}
    for worker, memory in workers.work("memory", [(one, ()) for one in workers.workers]):
        found.setdefault(worker.mesh, []).append(memory)
    return [
        min(found[mesh], key=lambda one: math.inf if one[0] is None else one[0])
        for mesh in range(len(workers.meshes))
    ]


def _platform(cluster: ClusterSpec, mesh: DeviceMesh, options: RayOptions) -> str:
    """Return "cpu" or "gpu": what the options say, else the devices of the cluster."""
    named = options.platform
    if named is None:
        named = cluster.host_groups[host_of(cluster, mesh.device_ids[0])[1]].device.platform
    if named not in _PLATFORMS:
        raise PlanError(
            f"runtime='ray' runs on CPUs and GPUs, but cluster {cluster.name!r} has {named!r}; "
            "RayOptions(platform='cpu') tries the plan on host devices"
        )
    return _PLATFORMS[named]
