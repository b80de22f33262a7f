"""Copies from whoever has a slice to whoever lacks it, for small tensors where operations block.

A holder goes on sending while those it has fed do: n receivers of h holders take log2 (1 + n / h)
latencies, in place of 1 + log2 n where one receiver feeds the others. Next is always the copy that
ends first, of the slice that most devices lack.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from alpa_interchange.reshard import Transfer
from resharding.drafts import copy_of
from resharding.network import Links
from resharding.slices import Slice

_Copy: TypeAlias = tuple[float, int, int, int, int]  # end, lacking (< 0), slice, sender, receiver


def slice_trees(slices: Sequence[Slice], links: Links) -> list[Transfer]:
    """Return the copies of `slices`, in order."""
    latency, host_of = links.network.latency, links.host_of
    lane_of = host_of if links.network.issue == "host" else {device: device for device in host_of}
    free = dict.fromkeys(lane_of.values(), 0.0)
    made: list[Transfer] = []
    lacking = [(number, list(piece.receivers)) for number, piece in enumerate(slices)]
    holding: list[dict[int, tuple[float, tuple[int, ...]]]] = [  # since when, after which copy
        dict.fromkeys(piece.holders, (0.0, ())) for piece in slices
    ]
    while lacking := [(number, devices) for number, devices in lacking if devices]:
        best: _Copy | None = None
        for number, devices in lacking:
            size = slices[number].num_bytes
            ready = _first(
                ((max(since, free[lane_of[d]]), d) for d, (since, _) in holding[number].items()),
                host_of,
            )
            idle = _first(((free[lane_of[d]], d) for d in devices), host_of)
            for (since, sender), (until, receiver) in itertools.product(ready, idle):
                end = max(since, until) + size / links.hop_rate(sender, receiver) + latency
                if best is None or (end, -len(devices)) < best[:2]:
                    best = end, -len(devices), number, sender, receiver
        assert best is not None
        end, _, number, sender, receiver = best
        made.append(copy_of(slices[number].box, sender, receiver, holding[number][sender][1]))
        holding[number][receiver] = end, (len(made) - 1,)
        dict(lacking)[number].remove(receiver)
        free[lane_of[sender]] = free[lane_of[receiver]] = end
    return made


def _first(
    times: Iterable[tuple[float, int]], host_of: Mapping[int, int]
) -> Iterable[tuple[float, int]]:
    """Return the earliest (time, device) of each host, whose devices have the same links."""
    first: dict[int, tuple[float, int]] = {}
    for time, device in times:
        host = host_of[device]
        if host not in first or time < first[host][0]:
            first[host] = time, device
    return first.values()
