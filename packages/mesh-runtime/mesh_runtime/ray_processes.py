"""The processes of mesh hosts on a Ray cluster: their actors, those that stand by, their places.

Starting a Python process and importing jax is most of what a replaced worker takes: 30 of 39 s on
two cores at a load of 18, 8 of 15 on a quieter machine. So that a run goes on sooner, a process
for each host can be started in advance; it stands by without a JAX client and without resources,
and takes the place, the GPUs and the number of a worker that failed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
from attrs import define, field

from mesh_runtime.gpu_plane import GpuTransportMaker
from mesh_runtime.ray_placement import RayMesh
from mesh_runtime.transfers import TransportMaker

if TYPE_CHECKING:
    from mesh_runtime.ray_options import RayOptions

Where: TypeAlias = tuple[int, int]
"""The number of a mesh, and of a host of it."""

_DEVICES = "--xla_force_host_platform_device_count"


@define(eq=False)
class Processes:
    """Actors by (mesh, host), the placement groups they stand on, and what stands by.

    `places` are the bundles of each mesh's hosts; `owns_ray` says that Ray was started for them.
    """

    ray: Any
    meshes: Sequence[RayMesh]
    options: RayOptions
    transport: TransportMaker | None
    gpu_transport: GpuTransportMaker | None
    places: Sequence[Sequence[int]]
    owns_ray: bool
    groups: list[Any] = field(factory=list)
    actors: dict[Where, Any] = field(factory=dict)
    standing_by: dict[Where, Any] = field(factory=dict)
    begun: dict[Where, Any] = field(factory=dict)  # a reference that comes when it stands by
    gpus: dict[Where, str] = field(factory=dict)  # those that a host was given, in CUDA's words

    @property
    def hosts(self) -> list[tuple[Where, int]]:
        """(mesh, host) of every process, and its bundle."""
        return [
            ((mesh, host), place)
            for mesh, hosts in enumerate(self.places)
            for host, place in enumerate(hosts)
        ]

    def start(self) -> None:
        """Start an actor for every host that has none."""
        for where, place in self.hosts:
            if where not in self.actors:
                self.actors[where] = self._made(where, place, stands_by=False)

    def prepare(self) -> None:
        """Start a process for every host beside its actor, to take its place if it must; nothing is
        waited for."""
        for where, place in self.hosts:
            if where not in self.standing_by:
                self.standing_by[where] = self._made(where, place, stands_by=True)
                self.begun[where] = self.standing_by[where].ready.remote()

    def end_actors(self) -> None:
        """End the actors; what they hold is lost."""
        self._kill(self.actors)
        self.actors.clear()

    def _kill(self, actors: Mapping[Where, Any]) -> None:
        for actor in actors.values() if self.ray.is_initialized() else ():
            with suppress(self.ray.exceptions.ActorHandleNotFoundError):  # of an ended Ray session
                self.ray.kill(actor, no_restart=True)

    def end(self) -> None:
        """End all processes, give back what was set aside, and end Ray if it was started here."""
        self.end_actors()
        groups, self.groups = self.groups, []
        standing_by, self.standing_by, self.begun = self.standing_by, {}, {}
        owned, self.owns_ray = self.owns_ray, False
        self._kill(standing_by)
        if not self.ray.is_initialized():
            return
        for group in groups:
            self.ray.util.remove_placement_group(group)
        if owned:
            self.ray.shutdown()

    def successor(self, seconds: float) -> Processes | None:
        """Return these places with what stands by as their actors, which must answer within
        `seconds` unless it is just being started; None, having ended everything, where nothing
        stands by or a node is lost."""
        self.end_actors()
        if not self.standing_by or not self._answer(seconds):
            self.end()
            return None
        made = Processes(
            self.ray,
            self.meshes,
            self.options,
            self.transport,
            self.gpu_transport,
            self.places,
            self.owns_ray,
            self.groups,
            actors=self.standing_by,
            gpus=self.gpus,
        )
        self.groups, self.standing_by, self.begun, self.owns_ray = [], {}, {}, False
        return made

    def _answer(self, seconds: float) -> bool:
        """Return whether all that stands by is there, and all its places."""
        from ray.util import placement_group_table

        if any(placement_group_table(group)["state"] != "CREATED" for group in self.groups):
            return False
        begun = list(self.begun.values())
        there, _ = self.ray.wait(begun, num_returns=len(begun), timeout=0)
        asked = [
            self.standing_by[where].ready.remote()
            for where, reference in self.begun.items()
            if reference in there  # others are on their way, and further than new ones
        ]
        if not asked:
            return True
        done, late = self.ray.wait(asked, num_returns=len(asked), timeout=seconds)
        try:
            self.ray.get(done)
        except self.ray.exceptions.RayError:
            return False
        return not late

    def _made(self, where: Where, place: int, stands_by: bool) -> Any:
        """Return a new actor for a host on its bundle, with its resources unless it stands by."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from mesh_runtime.ray_worker import ActorWorker

        mesh = self.meshes[where[0]]
        actor_class = self.ray.remote(concurrency_groups={"data": 1, "heartbeat": 1})(ActorWorker)
        return actor_class.options(
            num_cpus=0 if stands_by else mesh.num_cpus,
            num_gpus=0 if stands_by else mesh.num_gpus,
            max_restarts=0,
            allow_out_of_order_execution=True,  # a call that gets lost holds up no other
            max_task_retries=-1,  # calls that get lost on their way; a dead actor fails at once
            runtime_env={"env_vars": self._variables(mesh)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self.groups[0], placement_group_bundle_index=place
            ),
        ).remote(self.transport, self.gpu_transport, self.options)

    def _variables(self, mesh: RayMesh) -> Mapping[str, str]:
        """Return the environment of a mesh's processes."""
        given = self.options.environment
        platform = self.options.platform or ("cuda" if mesh.num_gpus else "cpu")
        flags = given.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        flags = re.sub(rf"{_DEVICES}=\d+", "", flags)
        if platform == "cpu":
            flags = f"{flags} {_DEVICES}={mesh.num_devices // mesh.num_hosts}"
        return {
            "JAX_PLATFORMS": platform,
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            **_own_variables(),
            **given,
            "XLA_FLAGS": flags.strip(),
        }


def _own_variables() -> dict[str, str]:
    """Return what lets workers keep compiled programs where this process does, and have the types
    that programs traced here have."""
    config: Any = jax.config
    found = {
        "ALPA_CACHE_DIR": os.environ.get("ALPA_CACHE_DIR"),
        "JAX_COMPILATION_CACHE_DIR": config.jax_compilation_cache_dir,
        "JAX_ENABLE_X64": str(int(config.jax_enable_x64)),
    }
    return {name: value for name, value in found.items() if value}
