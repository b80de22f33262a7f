"""XLA host devices: one CPU process that acts as several devices."""

from __future__ import annotations

import os
import re

import jax

from alpa_interchange import ClusterSpec
from alpa_meta.errors import PlanError

_FLAG = "--xla_force_host_platform_device_count"


def use_host_devices(count: int) -> None:
    """Make this process's jax run on `count` host devices; PlanError if it no longer can.

    XLA reads the number once, when the first device is asked for, so this comes before that.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    given = re.search(rf"{_FLAG}=(\d+)", flags)
    if given is not None and int(given[1]) < count:
        raise PlanError(
            f"the cluster has {count} host devices, but XLA_FLAGS says {given[0]}; unset XLA_FLAGS "
            f"or ask for --cluster host:{given[1]}"
        )
    if given is None:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()
    jax.config.update("jax_platforms", "cpu")
    found = len(jax.devices())
    if found < count:
        raise PlanError(
            f"the cluster has {count} host devices, but this process's jax had already started "
            f"with {found}; set XLA_FLAGS={_FLAG}={count} before python starts"
        )


def check_devices(cluster: ClusterSpec) -> str | None:
    """Return a note if `cluster` will be run on devices of another kind, None if they are its own.

    PlanError if this process has fewer devices than the cluster.
    """
    devices = jax.devices()
    if len(devices) < cluster.num_devices:
        raise PlanError(
            f"the cluster {cluster.name} has {cluster.num_devices} devices, but this process has "
            f"{len(devices)} ({devices[0].platform}); train on host:{len(devices)}, or only plan: "
            f"alpa plan --cluster {cluster.name}"
        )
    kinds = {group.device.platform for group in cluster.host_groups}
    if devices[0].platform in kinds:
        return None
    return (
        f"note: {cluster.name} is planned for, but the plan runs on this process's "
        f"{devices[0].platform} devices"
    )
