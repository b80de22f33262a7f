"""The cluster that a step runs on: a preset or file by name, or the devices of this process."""

from __future__ import annotations

import jax

from alpa_interchange import ClusterSpec
from alpa_meta.errors import PlanError
from cost_model import cluster as cluster_by_name


def local_cluster() -> ClusterSpec:
    """Return the cluster made of this process's devices."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return cluster_by_name(f"host:{len(devices)}")
    kind = devices[0].device_kind.lower()
    for name in ("h100", "h200", "b200", "a100", "v100", "l4"):
        if name in kind:
            return named_cluster(f"{name}:{len(devices)}")
    raise PlanError(
        f"this process has {len(devices)} devices of kind {devices[0].device_kind!r}, which the "
        "catalogue does not know; name a cluster: parallelize(step, cluster=...)"
    )


def named_cluster(name: str) -> ClusterSpec:
    """Return the cluster of a preset or a TOML file; PlanError if there is none."""
    try:
        return cluster_by_name(name)
    except (ValueError, OSError) as error:
        raise PlanError(str(error)) from None
