"""Where the processes of a runtime stand on a Ray cluster, and with which of its resources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from alpa_interchange.check import non_negative, positive
from mesh_runtime.runtime import NoRoomError

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@frozen(kw_only=True)
class RayMesh:
    """A mesh to make on the cluster: its grid of devices, spread evenly over `num_hosts` actors.

    Actor k stands on host `hosts[k]`; meshes that name the same number share that host, on one node
    of the cluster. By default each actor has a host of its own. `num_cpus` and `num_gpus` are what
    Ray sets aside for one actor; with GPUs, JAX in the actors runs on them.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    num_hosts: int = field(default=1, validator=positive)
    hosts: tuple[int, ...] = ()
    num_cpus: float = field(default=1.0, validator=non_negative)
    num_gpus: float = field(default=0.0, validator=non_negative)

    def __attrs_post_init__(self) -> None:
        if len(self.shape) != len(self.axis_names):
            raise ValueError(f"RayMesh needs a name per axis, got {self.shape}, {self.axis_names}")
        if self.num_devices % self.num_hosts:
            raise ValueError(
                f"RayMesh of {self.num_devices} devices cannot be spread evenly over "
                f"{self.num_hosts} hosts"
            )
        if self.hosts and len(set(self.hosts)) != self.num_hosts:
            raise ValueError(
                f"RayMesh.hosts must name a different host for each of the {self.num_hosts} "
                f"actors, got {self.hosts}"
            )

    @property
    def num_devices(self) -> int:
        return int(np.prod(self.shape))


def bundles_of(meshes: Sequence[RayMesh]) -> tuple[list[dict[str, float]], list[list[int]]]:
    """Return the resources of each host, and of each mesh the positions of its actors' hosts."""
    bundles: dict[Any, dict[str, float]] = {}
    places = []
    for number, mesh in enumerate(meshes):
        names: list[Any] = list(mesh.hosts or ((number, k) for k in range(mesh.num_hosts)))
        for name in names:
            bundle = bundles.setdefault(name, {"CPU": 0.0, "GPU": 0.0})
            bundle["CPU"] += mesh.num_cpus
            bundle["GPU"] += mesh.num_gpus
        places.append(names)
    position = {name: k for k, name in enumerate(bundles)}
    return list(bundles.values()), [[position[name] for name in names] for names in places]


def reserve(ray: Any, bundles: Sequence[dict[str, float]], strategy: str, timeout: float) -> Any:
    """Return the placement group of one bundle for each host; WorkerError if there is no room."""
    from ray.util import placement_group, remove_placement_group

    wanted = [{name: count for name, count in one.items() if count} for one in bundles]
    group: Any = placement_group([one or {"CPU": 0.001} for one in wanted], strategy=strategy)
    done, _ = ray.wait([group.ready()], timeout=timeout)
    if not done:
        nodes = [
            {name: count for name, count in node["Resources"].items() if name in ("CPU", "GPU")}
            for node in ray.nodes()
            if node["Alive"]
        ]
        remove_placement_group(group)
        raise NoRoomError(
            f"the cluster had no room within {timeout:g} s for the hosts of the meshes: they need "
            f"{wanted} ({strategy}), its nodes have {nodes}. Ask for less (cpus_per_actor, or a "
            "smaller cluster description), another placement, or add nodes"
        )
    return group
