"""Transfers in the order in which lanes that do one at a time get free, cards shared as they are.

A list schedule in the fluid model of `course`: whenever a transfer ends, those that may start now,
and whose hosts or devices are free, do so, the most pressing first. What presses is how long its
lanes have to work yet, and the row of transfers that waits for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from attrs import evolve

from alpa_interchange.reshard import Transfer
from resharding.course import Demand, lanes_of
from resharding.fluid import Fluid
from resharding.network import Links


def dispatched(
    transfers: Sequence[Transfer],
    demands: Sequence[Demand],
    links: Links,
    limit: float = math.inf,
) -> tuple[tuple[Transfer, ...], float]:
    """Return `transfers` in another order, and the seconds they take in it; inf from `limit` on."""
    count = len(transfers)
    lanes = [lanes_of(transfer, links) for transfer in transfers]
    alone = [demand.num_bytes / demand.alone + demand.tail for demand in demands]
    load: dict[int, float] = {}  # by lane: seconds of what has not started
    dependents: list[list[int]] = [[] for _ in transfers]
    waits = [len(transfer.after) for transfer in transfers]
    for index, transfer in enumerate(transfers):
        for lane in lanes[index]:
            load[lane] = load.get(lane, 0.0) + alone[index]
        for earlier in transfer.after:
            dependents[earlier].append(index)
    behind = [0.0] * count
    for index in range(count - 1, -1, -1):
        behind[index] = alone[index] + max((behind[k] for k in dependents[index]), default=0.0)
    ready = [index for index in range(count) if not waits[index]]
    busy: set[int] = set()
    fluid, tails, now = Fluid(demands, links.rate), [], 0.0
    order: list[int] = []
    number = [0] * count
    left = count

    def urgency(index: int) -> float:
        own = [load[lane] for lane in lanes[index]]
        # lanes do their own work, and the one with the most of it is half of what counts
        return 2 * max(own, default=0.0) + sum(own) + 3 * (behind[index] - alone[index])

    while left and now < limit:
        pressing = {k: urgency(k) for k in ready}
        waiting = []
        for index in sorted(ready, key=lambda k: (-pressing[k], k)):
            if not busy.isdisjoint(lanes[index]):
                waiting.append(index)
                continue
            busy.update(lanes[index])
            number[index] = len(order)
            order.append(index)
            for lane in lanes[index]:
                load[lane] -= alone[index]
            if demands[index].num_bytes > 0:
                fluid.start(index)
            else:
                heapq.heappush(tails, (now + demands[index].tail, index))
        ready = waiting
        horizon = min(tails[0][0] if tails else math.inf, now + fluid.horizon())
        elapsed, now = horizon - now, horizon
        tolerance = 1e-12 * max(now, 1e-9)
        for index in fluid.advance(elapsed, tolerance):
            heapq.heappush(tails, (now + demands[index].tail, index))
        while tails and tails[0][0] <= now + tolerance:
            _, index = heapq.heappop(tails)
            left -= 1
            busy.difference_update(lanes[index])
            for other in dependents[index]:
                waits[other] -= 1
                if not waits[other]:
                    ready.append(other)
    if left:
        return tuple(transfers), math.inf
    made = tuple(
        evolve(transfers[k], after=tuple(sorted(number[other] for other in transfers[k].after)))
        if transfers[k].after
        else transfers[k]
        for k in order
    )
    return made, now
