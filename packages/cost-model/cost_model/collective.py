"""Time of collectives over mesh axes.

Every algorithm costs `latency + bytes * seconds_per_byte`, so a collective is the lower envelope of
a few lines: one per algorithm. With n devices on an axis of bandwidth b and hop latency a:

    ring        all-gather, reduce-scatter   (n-1) a + (n-1)/n B/b        -> _lines()
                all-reduce                 2 (n-1) a + 2 (n-1)/n B/b
    tree        all-reduce                 2 log2(n) a + 2 B/(0.6 b)
    pairwise    all-to-all                   (n-1) a' + (n-1)/n B/b       a' = a / 4: sends overlap
    chain       broadcast                    log2(n) a + B/b
    one hop     permute, send-receive        a + B/b
    hierarchy   all-reduce over two axes = reduce-scatter over the faster, all-reduce over the
                slower of 1/n of the bytes, all-gather over the faster     -> _nested()
    meeting     any kind                     n a + (as a ring) B/b         -> _envelope()

Devices that share a host's memory and cores (XLA host devices) do none of the first: the threads of
all n devices wait for the last, then each reads what the others wrote. What counts is that they
meet, once per collective whatever its kind and axes.

Independent collectives of one kind over the same axes are sent together, in buckets of
`BUCKET_BYTES`: a bucket costs one latency.                             -> bucketed_seconds()
A tensor's share of a full bucket is a sum over tensors and never above what the buckets cost, so
that a search can add it up and still bound.                            -> bucket_share_seconds()

All-gathers and reduce-scatters have no tree: NCCL runs them as rings, and measured ones over 16 and
32 H100 on several hosts take times in the ratio of 15 to 31 hops (Ultra-Scale Playbook).

B is defined in `COLLECTIVE_BYTES`. Tree all-reduce: Sanders, Speck, Traeff 2009 as in NCCL 2.4;
ring: Patarasuk and Yuan 2009. A collective over several axes takes the best of one flat ring over
the slowest axis' bandwidth and the hierarchy.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alpa_interchange.mesh import MeshAxis

COLLECTIVE_BYTES: Mapping[str, str] = {
    "all-reduce": "the buffer of one device (input and output have the same size)",
    "all-gather": "the gathered output of one device",
    "reduce-scatter": "the unreduced input of one device",
    "all-to-all": "the buffer of one device (input and output have the same size)",
    "collective-permute": "the buffer of one device",
    "broadcast": "the broadcast buffer",
    "send-receive": "the buffer that is sent",
}

BUCKET_BYTES = float(25 << 20)
"""Most bytes of collectives sent together: the default of PyTorch's DistributedDataParallel (Li et
al., VLDB 2020, section 3.2.3). XLA's combiners on GPUs take 30 MiB of results by default."""

Line = tuple[float, float]  # seconds, seconds per byte
_TREE = 0.6  # share of the ring's bandwidth; keeps fitted rings best above a few MB, as NCCL tunes


def collective_seconds(
    kind: str, bytes: Any, axes: tuple[MeshAxis, ...], meeting: bool = False
) -> Any:
    """Return the seconds of a collective over the devices of `axes` together.

    `bytes` is a number or an array; COLLECTIVE_BYTES says which buffer it measures. No bytes or
    one device take no time. `meeting` says that the devices are threads of one process.
    """
    lines = _envelope(kind, axes, meeting)
    if isinstance(bytes, np.ndarray):
        times = [latency + bytes * slope for latency, slope in lines]
        return np.where(bytes > 0, functools.reduce(np.minimum, times), 0.0)
    if bytes <= 0:
        return 0.0
    best = math.inf
    for latency, slope in lines:
        time = latency + bytes * slope
        if time < best:
            best = time
    return best


def bucketed_seconds(
    kind: str,
    bytes: Sequence[float] | Mapping[float, int],
    axes: tuple[MeshAxis, ...],
    launch: float = 0.0,
    meeting: bool = False,
) -> float:
    """Return the seconds of collectives of `bytes` each, or of how many there are of each number of
    bytes, sent together as far as buckets allow.

    A tensor larger than a bucket goes alone; the rest fill buckets to the brim, as if cut. Each
    tensor takes `launch` seconds to put into a bucket and out of it. Sending all alone is the most.
    """

    def single(size: float) -> float:
        return float(collective_seconds(kind, size, axes, meeting))

    # Equal layers send equal tensors: each size is priced once.
    sizes = [(size, count, single(size)) for size, count in Counter(bytes).items()]
    alone = sum(count * time for size, count, time in sizes if size >= BUCKET_BYTES)
    shared = [(size, count) for size, count, _ in sizes if size < BUCKET_BYTES]
    full, left = divmod(sum(size * count for size, count in shared), BUCKET_BYTES)
    seconds = alone + full * single(BUCKET_BYTES) + single(left)
    seconds += launch * sum(count for _, count in shared)
    return min(seconds, sum(count * time for _, count, time in sizes))


def bucket_share_seconds(
    kind: str,
    bytes: float,
    axes: tuple[MeshAxis, ...],
    launch: float = 0.0,
    meeting: bool = False,
) -> float:
    """Return the seconds a tensor of `bytes` adds to a full bucket, or alone if that is less."""
    alone = float(collective_seconds(kind, bytes, axes, meeting))
    if bytes >= BUCKET_BYTES:
        return alone
    full = float(collective_seconds(kind, BUCKET_BYTES, axes, meeting))
    return min(alone, full * bytes / BUCKET_BYTES + launch)


def seconds_per_byte(kind: str, axes: tuple[MeshAxis, ...]) -> float:
    """Return what a further byte of a large collective takes, of any algorithm at least."""
    return min(slope for _, slope in _envelope(kind, axes))


@functools.lru_cache(maxsize=65536)
def _envelope(kind: str, axes: tuple[MeshAxis, ...], meeting: bool = False) -> tuple[Line, ...]:
    """Return the (latency, seconds per byte) of which the least is the time at some size."""
    if kind not in COLLECTIVE_BYTES:
        raise ValueError(f"collective kind must be one of {tuple(COLLECTIVE_BYTES)}, got {kind!r}")
    axes = tuple(axis for axis in axes if axis.size > 1)
    if not axes:
        return ((0.0, 0.0),)
    size = math.prod(axis.size for axis in axes)
    bandwidth = min(axis.bandwidth for axis in axes)
    latency = max(axis.latency for axis in axes)
    lines = _lines(kind, size, bandwidth, latency)
    if meeting:
        return ((size * latency, lines[0][1]),)
    if len(axes) > 1:
        lines += _nested(kind, axes)
    useful = [line for line in lines if not any(_beats(other, line) for other in lines)]
    return tuple(dict.fromkeys(useful))


def _beats(one: Line, other: Line) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def _lines(kind: str, n: int, bandwidth: float, latency: float) -> list[Line]:
    share, depth = (n - 1) / n, math.log2(n)
    if kind == "all-reduce":
        return [
            (2 * (n - 1) * latency, 2 * share / bandwidth),
            (2 * depth * latency, 2 / (_TREE * bandwidth)),
        ]
    if kind in ("all-gather", "reduce-scatter"):
        return [((n - 1) * latency, share / bandwidth)]
    if kind == "all-to-all":
        return [(latency + (n - 2) * latency / 4, share / bandwidth)]
    if kind == "broadcast":
        return [(depth * latency, 1 / bandwidth)]
    return [(latency, 1 / bandwidth)]


def _nested(kind: str, axes: tuple[MeshAxis, ...]) -> list[Line]:
    """Return the lines of doing the collective axis by axis, the fastest axis on the most bytes."""
    fast, *rest = sorted(axes, key=lambda axis: -axis.bandwidth)
    inner = tuple(rest)
    if kind == "all-reduce":
        parts = [
            (_envelope("reduce-scatter", (fast,)), 1.0),
            (_envelope("all-reduce", inner), 1 / fast.size),
            (_envelope("all-gather", (fast,)), 1.0),
        ]
    elif kind in ("all-gather", "reduce-scatter"):
        parts = [(_envelope(kind, (fast,)), 1.0), (_envelope(kind, inner), 1 / fast.size)]
    elif kind in ("all-to-all", "broadcast"):
        parts = [(_envelope(kind, (fast,)), 1.0), (_envelope(kind, inner), 1.0)]
    else:
        return []
    totals: list[Line] = [(0.0, 0.0)]
    for lines, scale in parts:
        totals = [
            (latency + more, slope + scale * per_byte)
            for latency, slope in totals
            for more, per_byte in lines
        ]
    return totals
