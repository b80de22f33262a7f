"""Calibration profiles: what was measured on a machine, as versioned data."""

from __future__ import annotations

import os
import re
from pathlib import Path

from attrs import evolve, field, frozen

from alpa_interchange.cluster import ClusterSpec, DeviceSpec, LinkSpec
from alpa_interchange.document import load, save
from cost_model.kernel import KernelEfficiency


@frozen(kw_only=True)
class Sample:
    """One measurement: what ran, on how many devices, and the median seconds it took."""

    name: str  # "matmul", "elementwise", "all-reduce", "host-to-device", "layer", ...
    seconds: float
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bytes: float = 0.0
    flops: float = 0.0
    num_devices: int = 1


@frozen(kw_only=True)
class Profile:
    """The machine as measured: constants for the catalogue and the samples behind them."""

    name: str
    date: str  # ISO day
    driver: str  # versions of what ran: jax, platform, driver
    device: DeviceSpec
    devices_per_host: int
    intra_host: LinkSpec
    efficiency: KernelEfficiency = field(factory=KernelEfficiency)
    host_link: LinkSpec | None = None
    shared_compute: bool = False
    samples: tuple[Sample, ...] = ()
    version: int = 1


def marked_quantile(name: str) -> bool:
    """Return whether a cluster of that name is at a quantile of its costs (`quantile`)."""
    return re.search(r"@[\d.]+%$", name) is not None


def marked_program(name: str) -> bool:
    """Return whether a cluster of that name states the program that runs on it (`program`)."""
    return re.search(r"\+[a-z][a-z0-9-]*(,[a-z]+\d*)*$", name) is not None


def apply_profile(cluster: ClusterSpec, profile: Profile) -> ClusterSpec:
    """Return `cluster` with the measured device and links in every host group of that device.

    The memory stays that of the cluster, and so does a link that was not measured, as only one
    device was there. A cluster at a quantile, whose costs were the profile's before they were
    scaled, stays as it is, and so does one whose costs are those of another program.
    """
    if marked_quantile(cluster.name) or marked_program(cluster.name):
        return cluster
    groups = tuple(
        evolve(
            group,
            device=evolve(profile.device, memory=group.device.memory),
            intra_host=profile.intra_host if profile.devices_per_host > 1 else group.intra_host,
            host_link=profile.host_link or group.host_link,
        )
        if group.device.name == profile.device.name and not group.shared_compute
        else group
        for group in cluster.host_groups
    )
    return evolve(cluster, host_groups=groups)


def cache_directory() -> Path:
    """Return where this user's profiles and plans are: $ALPA_CACHE_DIR, or `alpa` in the user's
    cache."""
    base = os.environ.get("ALPA_CACHE_DIR")
    if base:
        return Path(base)
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "alpa"


def profile_directory() -> Path:
    """Return the directory of the user's profiles."""
    return cache_directory() / "profiles"


def stored_profile(name: str) -> Profile | None:
    """Return the user's profile of that name, or None where there is none."""
    path = profile_directory() / f"{name}.json"
    return load(path, Profile) if path.exists() else None


def store_profile(profile: Profile, path: str | os.PathLike[str] | None = None) -> Path:
    """Write `profile` to `path`, or under its name to the user's profiles; return where."""
    target = Path(path) if path is not None else profile_directory() / f"{profile.name}.json"
    save(profile, target)
    return target
