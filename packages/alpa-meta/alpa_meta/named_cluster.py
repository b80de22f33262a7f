"""The cluster that a step runs on: a preset or file by name, or the devices of this process."""

from __future__ import annotations

import os

import jax
from attrs import evolve

from alpa_interchange import ClusterSpec
from alpa_meta.errors import PlanError
from cost_model import catalogue_device
from cost_model import cluster as cluster_by_name
from mesh_runtime import memory_of


def local_cluster() -> ClusterSpec:
    """Return the cluster made of this process's devices, with the memory that jax may take."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return cluster_by_name(f"host:{len(devices)}")
    device = catalogue_device(devices[0].device_kind)
    if device is None:
        raise PlanError(
            f"this process has {len(devices)} devices of kind {devices[0].device_kind!r}, which "
            "the catalogue does not know; name a cluster: parallelize(step, cluster=...)"
        )
    return _with_memory(
        named_cluster(f"{device.name}:{len(devices)}"), memory_of(jax.local_devices())
    )


def _with_memory(cluster: ClusterSpec, memory: float | None) -> ClusterSpec:
    if memory is None:
        return cluster
    groups = tuple(
        evolve(group, device=evolve(group.device, memory=memory)) for group in cluster.host_groups
    )
    return evolve(cluster, host_groups=groups)


def as_cluster(cluster: ClusterSpec | str) -> ClusterSpec:
    """Return a cluster that is given itself or by name."""
    return cluster if isinstance(cluster, ClusterSpec) else named_cluster(cluster)


def named_cluster(name: str | os.PathLike[str]) -> ClusterSpec:
    """Return the cluster of a preset or a TOML file; PlanError if there is none."""
    if not isinstance(name, str | os.PathLike):
        raise PlanError(
            "cluster must be a name such as 'h100:16', a TOML file, a ClusterSpec "
            f"or None for the devices of this process, got {name!r}"
        )
    try:
        return cluster_by_name(name)
    except (ValueError, OSError) as error:
        raise PlanError(str(error)) from None
