"""All-gathers in stages, for small tensors where operations block: in each a ring of few devices.

n devices want a tile of m slices that are cut out of it like a grid. Slices go to a device each,
and then a ring of f devices for each prime factor f of n: after each, its devices have the same,
and the next is with devices that have something else. For 4 hosts x 2 devices, slices 0 to 7:

    collected   0 | 1 | 2 | 3 | 4 | 5 | 6 | 7
    over hosts  01  |  01 | 23  |  23 | 45 ...      device 0 of hosts 0 and 1, device 0 of 2 and 3
                0123  x 4             | 4567  x 4   device 0 of all hosts, device 1 of all hosts
    inside      01234567  x 8

It takes m / n + sum (f - 1) latencies, in place of m / n + n - 1 of one ring; a host takes in the
tile once by its cards.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from alpa_interchange.reshard import Transfer
from resharding.drafts import gather_of
from resharding.slices import Box, Slice, bounding_box

Groups = list[list[int]]  # devices of each host


def factors(count: int) -> list[int]:
    """Return the prime factors of a count, the smallest first."""
    found, factor = [], 2
    while count > 1:
        while count % factor == 0:
            found.append(factor)
            count //= factor
        factor += 1
    return found


def rings_in_turn(per_host: int, num_hosts: int, hosts_block: bool) -> int:
    """Return how many latencies the rings take; a host that blocks does one of its own a time."""
    inside, across = factors(per_host), factors(num_hosts)
    if not hosts_block:
        return sum(f - 1 for f in (*inside, *across))
    return per_host * sum(f - 1 for f in across) + sum(per_host // f * (f - 1) for f in inside)


@define
class Exchange:
    """The owners of the slices of a tile, and the rings that gather them, stage by stage."""

    hosts: Groups
    owners: dict[Box, int] = field(factory=dict)
    stages: list[list[tuple[Box, tuple[int, ...]]]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        sizes = {len(devices) for devices in self.hosts}
        if len(sizes) > 1:  # hosts that are no grid
            self.hosts = [[device] for devices in self.hosts for device in devices]

    def split(self, pieces: Sequence[Slice]) -> None:
        """Fill in owners and stages."""
        inside, across = factors(len(self.hosts[0])), factors(len(self.hosts))
        self.stages = [[] for _ in (*inside, *across)]
        self._split(self.hosts, pieces, [(f, True) for f in inside] + [(f, False) for f in across])

    def _split(
        self, hosts: Groups, pieces: Sequence[Slice], levels: Sequence[tuple[int, bool]]
    ) -> None:
        """Split devices and pieces by the last ring first, and add that ring."""
        if not pieces:
            return
        if not levels:
            self.owners.update((piece.box, hosts[0][0]) for piece in pieces)
            return
        (count, inside), *others = levels
        if inside:
            each = len(hosts[0]) // count
            parts = [[d[k * each : (k + 1) * each] for d in hosts] for k in range(count)]
        else:
            each = len(hosts) // count
            parts = [hosts[k * each : (k + 1) * each] for k in range(count)]
        for part, some in zip(parts, _cut(pieces, count), strict=True):
            self._split(part, some, others)
        flat = [[device for devices in part for device in devices] for part in parts]
        box = bounding_box(piece.box for piece in pieces)
        self.stages[len(others)] += [(box, ring) for ring in zip(*flat, strict=True)]

    def gathers(self, arrived: dict[Box, int], first: int) -> list[Transfer]:
        """Return the rings; `arrived`: which transfer brings a piece, `first`: their number."""
        brought: dict[int, list[int]] = {}
        for box, owner in self.owners.items():
            brought.setdefault(owner, []).append(arrived[box])
        made: list[Transfer] = []
        for rings in self.stages:
            for box, ring in rings:
                waits = sorted({number for device in ring for number in brought.get(device, ())})
                for device in ring:
                    brought[device] = [first + len(made)]
                made.append(gather_of(box, ring, tuple(waits)))
        return made


def _cut(pieces: Sequence[Slice], count: int) -> list[list[Slice]]:
    """Return `count` boxes of a grid of pieces, cut where it has the most; some may be empty."""
    borders = [
        sorted({piece.box.start[dim] for piece in pieces})
        for dim in range(len(pieces[0].box.start))
    ]
    if not borders:
        return [list(pieces), *([] for _ in range(count - 1))]
    dim = max(range(len(borders)), key=lambda d: len(borders[d]))
    number = {start: k for k, start in enumerate(borders[dim])}
    parts: list[list[Slice]] = [[] for _ in range(count)]
    for piece in pieces:
        parts[number[piece.box.start[dim]] * count // max(count, len(number))].append(piece)
    return parts
