"""Which bandwidth and latency the axes of a logical mesh get from the links under them."""

from __future__ import annotations

import math

from attrs import frozen

from alpa_interchange.cluster import ClusterSpec, HostGroup
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from cost_model.link_table import link_rate

# of the links of one axis: seconds are differentiated by links that are slower by 1e-4
_SAME = 1e-3


@frozen(kw_only=True)
class TransferLinks:
    """What a transfer between two submeshes passes through, bytes/s in one direction: `devices` are
    the ports of a device of source and target, `hosts` what a host of each shares to other hosts;
    None on one host. `latency` is in seconds."""

    latency: float
    devices: tuple[float, float]
    hosts: tuple[float, float] | None = None


def nic_bandwidth(group: HostGroup, devices: int) -> float:
    """Return the bytes/s, one direction, that `devices` devices of one host share to other hosts.

    With rails a device reaches its own interface only, so few devices use few interfaces.
    """
    used = group.num_nics
    if group.rail:
        used = min(
            group.num_nics, max(1, math.ceil(group.num_nics * devices / group.devices_per_host))
        )
    return used * group.inter_host.effective_bandwidth


def logical_mesh(
    cluster: ClusterSpec,
    submesh: SubmeshSpec,
    shape: tuple[int, ...],
    axis_names: tuple[str, ...] | None = None,
) -> LogicalMesh:
    """Return the mesh of `shape` over `submesh` with the link data of every axis.

    Devices are laid out row-major: host by host, the last axis varies fastest. An axis whose groups
    stay inside a host runs over the intra-host link. An axis that leaves the host gets its share of
    the host's interfaces: when k devices of a group sit on a host of d used devices, d / k groups
    compete, so each moves (interfaces of the host) * k / d bytes/s, and never more than the link
    inside the host. Its ring passes k - 1 hops inside a host for each between hosts: the latency is
    their mean.
    """
    names = axis_names or tuple(f"axis{number}" for number in range(len(shape)))
    if len(names) != len(shape):
        raise ValueError(
            f"a logical mesh of shape {shape} needs {len(shape)} axis names, got {names}"
        )
    if math.prod(shape) != submesh.num_devices:
        raise ValueError(
            f"logical mesh {shape} has {math.prod(shape)} devices, but the submesh of "
            f"{submesh.num_hosts} x {submesh.devices_per_host} has {submesh.num_devices}"
        )
    group = host_group(cluster, submesh)
    per_host = submesh.devices_per_host
    axes = []
    stride = submesh.num_devices
    for name, size in zip(names, shape, strict=True):
        stride //= size
        if submesh.num_hosts == 1 or stride * size <= per_host and per_host % (stride * size) == 0:
            bandwidth, latency = link_rate(group.intra_host, size)
        else:
            on_host = max(1, per_host // stride)
            share = nic_bandwidth(group, per_host) * on_host / per_host
            near = min(on_host, size)
            inside, hop = link_rate(group.intra_host, near)
            bandwidth = min(share, inside) if on_host > 1 else share
            latency = ((near - 1) * hop + group.inter_host.latency) / near
        axes.append(MeshAxis(name=name, size=size, bandwidth=bandwidth, latency=latency))
    return LogicalMesh(axes=tuple(axes))


def leaves_host(axis: MeshAxis, group: HostGroup) -> bool:
    """Return whether an axis of a logical mesh has other links than those inside its hosts."""
    bandwidth, latency = link_rate(group.intra_host, axis.size)
    same = math.isclose(axis.bandwidth, bandwidth, rel_tol=_SAME)
    return not (same and math.isclose(axis.latency, latency, rel_tol=_SAME))


def host_group(cluster: ClusterSpec, submesh: SubmeshSpec) -> HostGroup:
    """Return the host group that `submesh` is cut from; ValueError where it does not fit."""
    if submesh.host_group >= len(cluster.host_groups):
        raise ValueError(
            f"SubmeshSpec.host_group is {submesh.host_group}, but cluster {cluster.name!r} has "
            f"{len(cluster.host_groups)} host groups"
        )
    group = cluster.host_groups[submesh.host_group]
    if submesh.num_hosts > group.num_hosts or submesh.devices_per_host > group.devices_per_host:
        raise ValueError(
            f"a submesh of {submesh.num_hosts} x {submesh.devices_per_host} devices does not fit "
            f"into host group {submesh.host_group} of cluster {cluster.name!r}, which has "
            f"{group.num_hosts} x {group.devices_per_host}"
        )
    return group
