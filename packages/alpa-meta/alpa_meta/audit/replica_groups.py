"""Replica groups of compiled collectives: read from HLO text, and named by mesh axes.

A device is meant by its position in the logical mesh (row-major, last axis fastest): that is how
XLA numbers the partitions of a program compiled for a `jax.sharding.Mesh`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\}[,\s]*)*)\}")
_TILED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESHED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)|, device_ids=\[([\d,]+)\])?"
    r"\s*\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\s*\d+\}[,\s]*)*)\}")


def read_groups(instruction: str, num_devices: int) -> Groups:
    """Return the groups of an HLO collective; source-target pairs for a permutation.

    XLA writes them in three ways: listed, `{{0,1},{2,3}}` (`{}` is one group of all); tiled,
    `[2,2]<=[4]` with an optional transpose; and by mesh axes,
    `mesh['axis_0'=2,'axis_1'=2] {'axis_1'}` with sub-axes as `'axis_1':(1)2`.
    """
    pairs = _PAIRS.search(instruction)
    if pairs:
        return _listed(pairs.group(1))
    listed = _LISTED.search(instruction)
    if listed:
        return _listed(listed.group(1)) or (tuple(range(num_devices)),)
    tiled = _TILED.search(instruction)
    if tiled:
        ids = _device_ids(tiled.group(2), tiled.group(3))
        return _rows(ids.reshape(_numbers(tiled.group(1))))
    meshed = _MESHED.search(instruction)
    if meshed:
        return _meshed(meshed)
    if "replica_groups=" in instruction:
        raise ValueError(
            "replica groups must be listed, tiled or by mesh axes, got "
            f"{instruction[instruction.index('replica_groups=') :][:120]!r}; this XLA writes a "
            "syntax the audit does not read"
        )
    return (tuple(range(num_devices)),)


def axes_of_groups(groups: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes (sorted) whose lines are exactly `groups`, None if no axes have them.

    Axes of size 1 are never named: a collective along them does nothing.
    """
    shape = tuple(axis_sizes.values())
    members = sorted(device for group in groups for device in group)
    if members != list(range(int(np.prod(shape)))):
        return None
    position = np.stack(np.unravel_index(np.arange(len(members)), shape), axis=-1)
    varying = position[list(groups[0])]
    used = [bool((varying[:, dim] != varying[0, dim]).any()) for dim in range(len(shape))]
    line = int(np.prod([size for size, use in zip(shape, used) if use]))
    fixed = np.array([not use for use in used])
    for group in groups:
        rest = position[list(group)][:, fixed]
        if len(group) != line or (rest != rest[0]).any():
            return None
    return tuple(sorted(name for name, use in zip(axis_sizes, used) if use))


def axes_of_pairs(pairs: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes (sorted) along which `pairs` move, None if a device is out of range."""
    shape = tuple(axis_sizes.values())
    size = int(np.prod(shape))
    if any(not 0 <= device < size for pair in pairs for device in pair):
        return None
    used: set[str] = set()
    for source, target in pairs:
        start, stop = np.unravel_index(source, shape), np.unravel_index(target, shape)
        used |= {name for name, a, b in zip(axis_sizes, start, stop) if a != b}
    return tuple(sorted(used))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _listed(text: str) -> Groups:
    found = re.findall(r"\{([\d,\s]+)\}", text)
    return tuple(_numbers(group) for group in found)


def _rows(ids: NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in ids)


def _device_ids(dims: str, permutation: str | None) -> NDArray[np.int64]:
    shape = _numbers(dims)
    ids = np.arange(int(np.prod(shape))).reshape(shape)
    return ids if permutation is None else ids.transpose(_numbers(permutation))


def _meshed(match: re.Match[str]) -> Groups:
    """Return the groups of the mesh-axes syntax, splitting an axis where a sub-axis is named."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match.group(1))}
    if match.group(4) is not None:
        ids = np.array(_numbers(match.group(4)))
    elif match.group(2) is not None:
        ids = _device_ids(match.group(2), match.group(3)).reshape(-1)
    else:
        ids = np.arange(int(np.prod(list(sizes.values()))))
    named: dict[str, list[tuple[int, int]]] = {}
    order: list[tuple[str, int]] = []
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match.group(5)):
        start = int(before) if before else 1
        named.setdefault(name, []).append((start, int(size) if size else sizes[name]))
        order.append((name, start))

    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        done = 1
        for start, part in sorted(named.get(name, [])):
            if start > done:
                dims.append(start // done)
            place[name, start] = len(dims)
            dims.append(part)
            done = start * part
        if done < size:
            dims.append(size // done)
    inner = [place[key] for key in order]
    outer = [dim for dim in range(len(dims)) if dim not in inner]
    width = int(np.prod([dims[dim] for dim in inner]))
    return _rows(ids.reshape(dims).transpose((*outer, *inner)).reshape(-1, width))
