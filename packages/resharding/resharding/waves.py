r"""How large the groups of relays in waves are (`relays`), so that all are done together.

Variables: s_g, seconds that one copy of group g takes on the card of its holder, and the end T.
Group g has n_g copies and brings p_g s_g of the source, and its entries pass on r_g s_g each. All
start at once, smaller ones end first; what arrives is passed on one group after the other. While
the copies of groups g, g + 1, ... run, N_g in all, each holder sends at u_g of its card:

    F_g = sum over h <= g of (s_h - s_(h-1)) N_h / u_h                    fair sharing
    relays of g, g + 1, ... take sum of r_h s_h + b_h s_h inside, and have a card of an entry, less
    what holders send by it, from F_g + L on: all of it from the last F on, before it 1 - u_h S / A
    with S holders and A entries
    T = the end of that and the latencies of g left                       groups are done together
    sum p_g s_g = seconds of the source on its cards, sent once           -> _sizes()

u_g is below 1 where relays are so many that copies have less than their share of the card that
takes both in. u_g, and when relays begin, follow from the F of the round before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from resharding.division import Delivery
from resharding.network import Links

# Transfers of one draft: with 192 the worst of 1,000 random pairs at 10 us is 1.53 x the bound in
# place of 1.13, with 320 their mean is 0.03 % less and 95 % are planned in a tenth more time.
MOST_TRANSFERS = 256
# Relayed groups, and times as many chains, that are compared: up to 16 that mean is 1.0082.
_GROUPS = (1, 2, 4, 8, 16, 32)
# Kinds of groups that are compared with many groups: with 1 and with 3 it is the same to 0.01 %.
_MOST_KINDS = 2
_MOST_ROUNDS = 3  # of solving for sizes: with 2 and with 6 the mean is the same to 0.01 %
# Of a latency that a device may take to pass a slice on inside its host for it to do so at once,
# not group by group: with 1.0 the worst is 1.18 in place of 1.13, with 0.2 all is the same.
_INSIDE = 0.5
# Indices of a dim that parts of the first group have at least: with 1.0 and 3.0 the mean is the
# same to 0.01 %.
_LEAST_INDICES = 0.5
RELAYED = ("chain", "inside", "straight")  # ways on which receivers pass parts on

Ways: TypeAlias = tuple[
    tuple[str, int], ...
]  # of groups; how many times as many parts go by chains


@frozen
class Shape:
    """What the sizes of groups depend on."""

    seconds: float  # of the source on the cards of its holders, each byte sent once
    latency: float
    num_sources: int  # hosts of holders
    num_hosts: int  # to which a slice goes
    per_host: int  # devices there
    num_slices: int  # by host of holders
    num_copies: int  # of slices to hosts, once
    inner: float  # seconds inside a host for one on a card
    indices: int  # of the longest dim of a slice, along which it is cut

    @property
    def parts(self) -> int:
        """Of a slice in a group that is relayed, so that all entries have as many, if those are
        few."""
        lines = self.num_slices * self.num_sources
        return 1 if lines >= self.num_hosts else self.num_hosts // math.gcd(self.num_hosts, lines)

    @property
    def batched(self) -> bool:
        """Whether devices pass on inside their host most of a slice at once: in few transfers."""
        seconds = self.seconds / self.num_slices * self.inner * (self.per_host - 1)
        return seconds <= _INSIDE * self.latency

    @property
    def star(self) -> float:
        """Seconds that copies from holders to every host take at least."""
        return self.seconds * self.num_hosts + self.latency


@frozen
class Waves:
    """The end that is expected, and (way, share of a slice, parts) of groups, in order."""

    seconds: float
    groups: tuple[tuple[str, float, int], ...]


def shape_of(deliveries: Sequence[Delivery], links: Links) -> Shape | None:
    """Return the shape of what goes to other hosts; None where nothing goes to several devices.

    Where at least as many hosts hold as take in, the card of the busiest one that takes in is what
    all wait for: it stands for the card of a single holder that feeds a single host.
    """
    host_of = links.host_of
    remote = [each for each in deliveries if each.remote]
    most = max((len(each.receivers) for each in remote), default=1)
    if most < 2:
        return None
    into: dict[int, float] = {}  # host -> seconds
    number: dict[int, int] = {}  # host -> copies
    sources: set[int] = set()
    fed = parts = 0
    for each in remote:
        holding = {host_of[device] for device in each.senders}
        taking = {host_of[device] for device in each.receivers}
        sources |= holding
        parts += len(holding)
        fed = max(fed, len(taking))
        for host in taking:
            into[host] = into.get(host, 0.0) + each.piece.num_bytes / links.host_rate[host]
            number[host] = number.get(host, 0) + len(holding)
    seconds = sum(each.piece.num_bytes for each in remote)
    seconds /= sum(links.host_rate[host] for host in sources)
    shape = Shape(
        seconds=seconds,
        latency=links.network.latency,
        num_sources=len(sources),
        num_hosts=fed,
        per_host=-(-most // fed),
        num_slices=max(1, parts // len(sources)),
        num_copies=parts * fed,
        inner=min(
            links.card_rate[host_of[device]] / links.device_rate[device]
            for each in remote
            for device in each.receivers
        ),
        indices=max(max(remote, key=lambda each: each.piece.num_bytes).piece.box.shape, default=1),
    )
    if len(sources) < fed or fed == 1 and max(into.values()) <= seconds:
        return shape
    busiest = max(into, key=into.__getitem__)
    return evolve(
        shape, seconds=into[busiest], num_sources=1, num_hosts=1, num_slices=number[busiest]
    )


@functools.lru_cache(maxsize=1024)
def waves_of(shape: Shape, most: int = MOST_TRANSFERS) -> Waves | None:
    """Return the groups that are done first, of those within `most` transfers; None if none are."""
    best: Waves | None = None
    several, relays = shape.per_host > 1, shape.num_hosts > 1
    tails = [(), ("each",)] + ([("direct",), ("direct", "each")] if several and relays else [])
    middles: list[tuple[str, tuple[str, ...]]] = [("straight" if relays else "direct", ())]
    if several and relays:
        middles += [("inside", ()), ("inside", ("straight",))]
    if relays:
        middles += [("chain", ()), ("chain", ("straight",))]
    kinds = [(way, (*last, *tail)) for way, last in middles for tail in tails]
    for count in _GROUPS:
        ended: list[tuple[float, tuple[str, tuple[str, ...]]]] = []
        for way, tail in kinds:
            alike = (
                [(way, count)] if way == "chain" else [(way, 1)] * (count - ("straight" in tail))
            )
            ways = (*alike, *((last, 1) for last in tail))
            sizes = _sizes(shape, ways) if num_transfers(shape, ways) <= most else None
            if sizes is None:
                continue
            groups = _groups(shape, ways, sizes[1:])
            if groups[0][1] * shape.indices < _LEAST_INDICES * ways[0][1]:
                continue
            ended.append((sizes[0], (way, tail)))
            # a group more must gain something for its transfers
            if best is None or sizes[0] < best.seconds * 0.998:
                best = Waves(sizes[0], groups)
        if count > 1:  # those that are far off with two groups are with more
            kinds = [kind for _, kind in sorted(ended)[:_MOST_KINDS]]
    return best


def num_transfers(shape: Shape, ways: Ways) -> int:
    """Return how many transfers groups that go these ways take."""
    per_host = shape.per_host
    each = {
        "chain": shape.parts / shape.num_hosts,
        "inside": shape.parts,
        "straight": shape.parts * per_host,
        "direct": per_host,
        "each": per_host,
    }
    inside = ways.count(("inside", 1))
    heads = min(2, inside) if shape.batched else inside
    heads += sum(_heads(shape, times) for way, times in ways if way == "chain")
    count = sum(each[way] * times for way, times in ways) + heads * (per_host - 1)
    return round(count * shape.num_copies)


def _heads(shape: Shape, times: int) -> int:
    """Return by how many devices the parts of a slice that go by chains enter a host."""
    return 1 if shape.batched else min(shape.per_host, shape.parts * times)


def _groups(shape: Shape, ways: Ways, sizes: Sequence[float]) -> tuple[tuple[str, float, int], ...]:
    made = []
    for (way, times), size in zip(ways, sizes, strict=True):
        parts = shape.parts * times if way in RELAYED else 1
        made.append((way, size * parts * shape.num_slices / shape.seconds, parts))
    return tuple(made)


@functools.lru_cache(maxsize=4096)  # `waves_of` asks again with more transfers
def _sizes(shape: Shape, ways: Ways) -> tuple[float, ...] | None:
    """Return T and s_g of groups that go these ways; None if they cannot be done together."""
    latency, hosts, per_host = shape.latency, shape.num_hosts, shape.per_host
    copies, brought, passed, late, behind = [], [], [], [], []
    for way, times in ways:
        parts = shape.parts * times if way in RELAYED else 1
        number = shape.num_slices * parts
        brought.append(number)
        fed = 1 if way in RELAYED else hosts * (per_host if way == "each" else 1)
        copies.append(number * fed)
        again = {"inside": 1, "straight": per_host}.get(way, 0)
        passed.append(number * shape.num_sources * (hosts - 1) / hosts * again)
        hops = {"chain": hosts, "inside": 2, "straight": 2}.get(way, 1)
        behind.append(hosts - 1.0 if way == "chain" else 0.0)
        if per_host > 1 and way in ("chain", "inside", "direct"):
            hops += 1
            heads = _heads(shape, times) if way == "chain" else 1
            behind[-1] += shape.inner * (per_host - 1) * parts / heads
        late.append(hops * latency)
    count = len(copies)
    running = np.cumsum(copies[::-1])[::-1].astype(float)
    entering = running * shape.num_sources / hosts  # copies that an entry takes in
    share = min(1.0, shape.num_sources / hosts)  # of its card that holders need
    slowed = np.minimum(1.0, entering / (entering + max(passed)) / share)
    relays = np.array(passed)
    full = np.ones(count)
    if ways[0][0] == "chain":  # an entry takes in all of every chain
        entering[0] += copies[0] * shape.num_sources * (1 - 1 / hosts)
        full[0] = min(1.0, running[0] / entering[0])
    use = full
    begin = np.full(count, count)  # while copies of which group relays of each begin
    for _ in range(_MOST_ROUNDS):
        ends = _ends(running / use)
        matrix, right = np.zeros((count + 1, count + 1)), np.zeros(count + 1)
        matrix[:count, count], matrix[count, :count], right[count] = -1.0, brought, shape.seconds
        for g in range(count):
            right[g] = -late[g]
            matrix[g, :count] = ends[g]
            if passed[g]:
                matrix[g, g:count] += relays[g:]
                taken, last = use * share, ends[g]  # of the card of an entry
                for h in range(begin[g], count):
                    matrix[g, :count] += taken[h] * (ends[h] - last)
                    last = ends[h]
                if begin[g] < count:
                    right[g] += latency * taken[begin[g]]
            matrix[g, g] += behind[g]
        found = np.linalg.solve(matrix, right)
        ended = ends @ found[:count]
        relaying = (ended > ended[0] + latency) & (max(passed) > 0)
        before, use = use, np.where(relaying, np.minimum(slowed, full), full)
        earlier, begin = begin, np.searchsorted(ended, ended + latency)
        if (earlier == begin).all() and (before == use).all():
            break
    sizes = found[:count]
    if sizes[0] <= 0 or (np.diff(sizes) < -1e-9 * sizes[-1]).any():
        return None
    return (float(found[count]), *sizes.tolist())


def _ends(running: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return F by s: [groups, groups]."""
    steps = np.diag(running) - np.diag(running[1:], -1)
    return np.tril(np.cumsum(steps, axis=0))
