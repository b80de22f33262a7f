"""A list schedule of given transfers: the order in which those that block each other are issued."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from attrs import evolve

from alpa_interchange.reshard import Transfer
from resharding.course import demand_of, lanes_of
from resharding.drafts import Setting


def listed(transfers: Sequence[Transfer], setting: Setting) -> tuple[Transfer, ...]:
    """Return `transfers` in an order in which each starts as early as those before it let it.

    Next is always the transfer that can start first; among those the one that the longest row of
    transfers waits for.
    """
    links = setting.links
    if links.network.issue == "none":
        return tuple(transfers)
    lanes = [lanes_of(transfer, links) for transfer in transfers]
    seconds: list[float] = []
    dependents: list[list[int]] = [[] for _ in transfers]
    for index, transfer in enumerate(transfers):
        demand = demand_of(transfer, setting.element_bytes, links, transfers)
        seconds.append(demand.num_bytes / demand.alone + demand.tail)
        for earlier in transfer.after:
            dependents[earlier].append(index)
    behind = [0.0] * len(transfers)  # seconds from its start to the end of what waits for it
    for index in range(len(transfers) - 1, -1, -1):
        behind[index] = seconds[index] + max((behind[k] for k in dependents[index]), default=0.0)
    waits = [len(transfer.after) for transfer in transfers]
    ready_at = [0.0] * len(transfers)
    free: dict[int, float] = {}
    heap = [(0.0, -behind[k], k) for k in range(len(transfers)) if not waits[k]]
    heapq.heapify(heap)
    number: dict[int, int] = {}
    order: list[Transfer] = []
    while heap:
        start, urgency, index = heapq.heappop(heap)
        earliest = max((free.get(lane, 0.0) for lane in lanes[index]), default=0.0)
        if max(earliest, ready_at[index]) > start:
            heapq.heappush(heap, (max(earliest, ready_at[index]), urgency, index))
            continue
        end = start + seconds[index]
        free.update(dict.fromkeys(lanes[index], end))
        number[index] = len(order)
        order.append(transfers[index])
        for other in dependents[index]:
            ready_at[other] = max(ready_at[other], end)
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(heap, (ready_at[other], -behind[other], other))
    return tuple(
        evolve(transfer, after=tuple(sorted(number[k] for k in transfer.after)))
        if transfer.after
        else transfer
        for transfer in order
    )
