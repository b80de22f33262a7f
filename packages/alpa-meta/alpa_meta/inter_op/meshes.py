"""The submeshes a stage may run on, and the logical meshes tried on each."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from alpa_interchange import ClusterSpec, DeviceGroup, LogicalMesh, SubmeshSpec
from alpa_meta.errors import PlanError
from cost_model import CostModel

AXIS_NAMES = ("x", "y", "z", "w")
# Up to so many hosts, and with hosts of fewer devices, every factorisation is tried; beyond, only
# those with one axis across hosts. Of 55 meshes for 1,024 devices in hosts of 8 that leaves out 20,
# the costliest to solve for: collectives over two axes pay the slow links twice.
HOSTS_SPLIT_FREELY, LARGE_HOST = 4, 8


def submeshes(cluster: ClusterSpec) -> tuple[SubmeshSpec, ...]:
    """Return the rectangles stages are cut from: parts of a host, then whole hosts, smallest first.

    Parts of a host are its divisors; numbers of hosts divide the group's.
    """
    found = []
    for number, group in enumerate(cluster.host_groups):
        per_host = group.devices_per_host
        for devices in divisors(per_host):
            found.append(SubmeshSpec(num_hosts=1, devices_per_host=devices, host_group=number))
        for hosts in divisors(group.num_hosts):
            if hosts > 1:
                found.append(
                    SubmeshSpec(num_hosts=hosts, devices_per_host=per_host, host_group=number)
                )
    return tuple(sorted(found, key=lambda mesh: mesh.num_devices))


def logical_meshes(
    model: CostModel,
    submesh: SubmeshSpec,
    max_axes: int,
    names: Sequence[str] = AXIS_NAMES,
    ordered: bool = False,
) -> tuple[LogicalMesh, ...]:
    """Return the logical meshes of a submesh with up to `max_axes` axes, named by `names`.

    Of meshes that differ only in the order of axes with equal links one is kept, unless they are
    `ordered`: where pins name axes, the order matters. Of many large hosts, one axis at most
    reaches from host to host (`HOSTS_SPLIT_FREELY`).
    """
    seen: set[tuple[tuple[int, float, float], ...]] = set()
    meshes = []
    shapes = _factorisations(submesh.num_devices, min(max_axes, len(names)))
    for shape in sorted(shapes, key=lambda s: (len(s), s)):
        if not ordered and splits_hosts_twice(submesh, shape):
            continue
        mesh = model.logical_mesh(submesh, shape, tuple(names[: len(shape)]))
        kinds = tuple(sorted((axis.size, axis.bandwidth, axis.latency) for axis in mesh.axes))
        if ordered or kinds not in seen:
            seen.add(kinds)
            meshes.append(mesh)
    return tuple(meshes)


def splits_hosts_twice(submesh: SubmeshSpec, shape: Sequence[int]) -> bool:
    """Return whether two axes or more of a mesh of this shape reach across many large hosts."""
    many = submesh.num_hosts > HOSTS_SPLIT_FREELY and submesh.devices_per_host >= LARGE_HOST
    return many and _axes_across_hosts(shape, submesh.devices_per_host) > 1


def _axes_across_hosts(shape: Sequence[int], devices_per_host: int) -> int:
    """Return how many axes of a mesh in row-major order join devices of different hosts."""
    across, inside = 0, 1
    for size in reversed(shape):
        inside *= size
        across += size > 1 and devices_per_host % inside != 0
    return across


@functools.lru_cache(maxsize=64)  # asked for every state array
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _factorisations(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ordered factorisations of `number` into at most `most` factors above one."""
    if number == 1:
        yield (1,)
        return
    yield (number,)
    if most > 1:
        for first in divisors(number):
            if 1 < first < number:
                for rest in _factorisations(number // first, most - 1):
                    yield (first, *rest)


def whole_cluster(cluster: ClusterSpec) -> SubmeshSpec | None:
    """Return the submesh of all devices, None where the cluster has several kinds of hosts."""
    if len(cluster.host_groups) != 1:
        return None
    group = cluster.host_groups[0]
    return SubmeshSpec(num_hosts=group.num_hosts, devices_per_host=group.devices_per_host)


def memory_per_device(cluster: ClusterSpec, host_group: int = 0) -> float:
    """Return the bytes that a program may use on a device of a host group."""
    group = cluster.host_groups[host_group]
    share = group.devices_per_host if getattr(group, "shared_compute", False) else 1
    return float(group.device.memory) / share


def usable_memory(cluster: ClusterSpec, host_group: int, given: float | None) -> float:
    """Return the bytes a plan may use on a device: as given, else what there is."""
    return given or memory_per_device(cluster, host_group)


def device_groups(cluster: ClusterSpec, memory: float | None) -> tuple[DeviceGroup, ...]:
    """Return the hosts that stages are cut from, with the memory that plans may use."""
    return tuple(
        DeviceGroup(
            num_hosts=group.num_hosts,
            devices_per_host=group.devices_per_host,
            memory=usable_memory(cluster, number, memory),
        )
        for number, group in enumerate(cluster.host_groups)
    )


def host_of(cluster: ClusterSpec, device: int) -> tuple[int, int]:
    """Return (host, host group) of a device, hosts numbered group by group."""
    host = 0
    for number, group in enumerate(cluster.host_groups):
        if device < group.num_devices:
            return host + device // group.devices_per_host, number
        device -= group.num_devices
        host += group.num_hosts
    raise PlanError(f"cluster {cluster.name!r} has no device {device + cluster.num_devices}")
