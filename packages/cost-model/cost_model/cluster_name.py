"""Clusters by name: `<preset>[:<number of devices>]`, or the path of a TOML file."""

from __future__ import annotations

import difflib
import os

from attrs import evolve

from alpa_interchange.cluster import ClusterSpec
from cost_model.catalogue import HOSTS
from cost_model.cluster_file import read_cluster
from cost_model.host import HOST_PROFILE, host_group, host_profile


def cluster_names() -> tuple[str, ...]:
    """Return the presets that `cluster` knows."""
    return (*HOSTS, HOST_PROFILE)


def cluster(name_or_path: str | os.PathLike[str], *, measure: bool = True) -> ClusterSpec:
    """Return the cluster of a preset name or of a TOML file.

    `"h100:16"` is 16 devices of preset `h100`: hosts of 8 filled one by one. Without a number it is
    one host. More devices than one host has must fill whole hosts. `"host:8"` is this machine as 8
    XLA host devices that share its cores; it is measured at first use (under a second) and cached,
    unless `measure` is false.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml"):
        return read_cluster(text)
    preset, _, number = text.partition(":")
    preset = preset.lower()
    if preset != HOST_PROFILE and preset not in HOSTS:
        close = difflib.get_close_matches(preset, cluster_names(), n=4, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(HOSTS)}, host"
        raise ValueError(
            f"cluster {text!r} is not a preset; {hint} A file of your own must end in .toml"
        )
    count = _device_count(text, number)
    if preset == HOST_PROFILE:
        group = host_group(host_profile(measure=measure), count or 1)
        return ClusterSpec(name=text, host_groups=(group,))
    group = HOSTS[preset]
    count = count or group.devices_per_host
    if count <= group.devices_per_host:
        return ClusterSpec(name=text, host_groups=(evolve(group, devices_per_host=count),))
    if count % group.devices_per_host:
        raise ValueError(
            f"cluster {text!r}: {count} devices do not fill hosts of {group.devices_per_host}; "
            f"ask for a multiple of {group.devices_per_host}, or describe it in a TOML file"
        )
    hosts = count // group.devices_per_host
    return ClusterSpec(name=text, host_groups=(evolve(group, num_hosts=hosts),))


def _device_count(text: str, number: str) -> int:
    if not number and ":" not in text:
        return 0
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(
            f"cluster {text!r}: what follows ':' must be a number of devices of at least 1, "
            f"got {number!r}"
        )
    return int(number)
