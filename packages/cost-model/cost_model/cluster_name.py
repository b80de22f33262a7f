"""Clusters by name: `<preset>[:<devices>]`, `<preset>:<hosts>x<devices>`, or a TOML file; with
`@<percent>%` behind it at a quantile of its costs, with `+<executor>` as a training program runs
there."""

from __future__ import annotations

import difflib
import os
import re

from attrs import evolve

from alpa_interchange.cluster import ClusterSpec
from cost_model.catalogue import HOSTS
from cost_model.cluster_file import read_cluster
from cost_model.host import HOST_PROFILE, host_group, host_profile
from cost_model.program import as_run_by
from cost_model.quantile import at_quantile


def cluster_names() -> tuple[str, ...]:
    """Return the presets that `cluster` knows."""
    return (*HOSTS, HOST_PROFILE)


def cluster(name_or_path: str | os.PathLike[str], *, measure: bool = True) -> ClusterSpec:
    """Return the cluster of a preset name or of a TOML file.

    `"h100:16"` is 16 devices of preset `h100`: hosts of 8 filled one by one, `"h100:4x4"` 4 hosts
    with 4 devices each. Without a number it is one host. More devices than one host has must fill
    whole hosts. `"host:8"` is this machine as 8 XLA host devices that share its cores; it is
    measured at first use (under a second) and cached, unless `measure` is false. `"h100:16@90%"` is
    as slow as it is with probability 0.9 (`at_quantile`), `"h100:64+nanotron,flash"` costs what it
    does under that program (`as_run_by`).
    """
    text = os.fspath(name_or_path)
    stated = re.fullmatch(r"(.+)\+([a-z][a-z0-9-]*)((?:,[a-z]+\d*)*)", text)
    if stated is not None:
        properties = tuple(stated[3].split(",")[1:])
        return as_run_by(cluster(stated[1], measure=measure), stated[2], properties)
    if text.endswith(".toml"):
        return read_cluster(text)
    certain = re.fullmatch(r"(.+)@(.*)", text)
    if certain is not None:
        quantile = _quantile(text, certain[2])
        return at_quantile(cluster(certain[1], measure=measure), quantile)
    preset, _, number = text.partition(":")
    preset = preset.lower()
    if preset != HOST_PROFILE and preset not in HOSTS:
        close = difflib.get_close_matches(preset, cluster_names(), n=4, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}" if close else f"known: {', '.join(HOSTS)}, host"
        raise ValueError(
            f"cluster {text!r} is not a preset ({hint}) and does not end in .toml, as the file of "
            "a cluster of your own must"
        )
    hosts, count = _counts(text, number)
    if preset == HOST_PROFILE:
        if hosts != 1:
            raise ValueError(f"cluster {text!r}: this machine is one host; ask for host:{count}")
        group = host_group(host_profile(measure=measure), count or 1)
        return ClusterSpec(name=text, host_groups=(group,))
    group = HOSTS[preset]
    most = group.devices_per_host
    count = count or most
    if hosts > 1 and count > most:
        raise ValueError(
            f"cluster {text!r}: a host of {preset} has {most} devices, not {count}; ask for "
            f"{preset}:{hosts}x{most}, or describe it in a TOML file"
        )
    if count > most and count % most:
        raise ValueError(
            f"cluster {text!r}: {count} devices do not fill hosts of {most}; "
            f"ask for a multiple of {most}, or describe it in a TOML file"
        )
    if count > most:
        hosts, count = count // most, most
    group = evolve(group, num_hosts=hosts, devices_per_host=count)
    return ClusterSpec(name=text, host_groups=(group,))


def _quantile(text: str, percent: str) -> float:
    """Return the quantile that "90%" in the name `text` stands for."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)%", percent)
    if found is None or not 1 <= float(found[1]) <= 99:
        raise ValueError(
            f"cluster {text!r}: what follows '@' must be from 1% to 99%, such as 90%, got "
            f"{percent!r}"
        )
    return float(found[1]) / 100


def _counts(text: str, number: str) -> tuple[int, int]:
    """Return (hosts, devices of each or of all) that a name gives; no devices if it gives none."""
    if not number and ":" not in text:
        return 1, 0
    hosts, cross, devices = number.lower().rpartition("x")
    parts = [hosts, devices] if cross else [devices]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(
            f"cluster {text!r}: what follows ':' must be a number of devices of at least 1, or "
            f"hosts x devices such as 2x8, got {number!r}"
        )
    return int(hosts or 1), int(devices)
