"""The least time in which senders can share what has to be sent, by minimum cuts.

With x_is >= 0 of load i leaving sender s in S_i, sum_s x_is = D_i, the busiest sender takes

    min_x max_s sum_i x_is / r_s = max over sets S of sum {D_i : S_i inside S} / sum {r_s : s in S}

It is found with maximum flows: start from T = total / all senders, and as long as the flow does not
fit, the minimum cut names a set S with a larger quotient. Each round raises T to an exact quotient,
so the last one is the maximum (Dinkelbach's method).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence


def send_seconds(
    outgoing: Mapping[frozenset[int], float], rate: Mapping[int, float], quantum: float = 0.0
) -> float:
    """Return the least time in which senders of `rate` bytes/s can share the load.

    `outgoing[S]` bytes may leave through any of the senders in S, in parts of whole `quantum`s.
    """
    if not outgoing:
        return 0.0
    groups = list(outgoing)
    crowd = {sender for group in groups for sender in group}
    if sum(map(len, groups)) == len(crowd):  # no sender in two groups: each group for itself
        return max(
            _in_whole(
                amount, [rate[s] for s in group], amount / sum(rate[s] for s in group), quantum
            )
            for group, amount in outgoing.items()
        )
    everyone, amount = crowd, sum(outgoing.values())
    level = amount / sum(rate[sender] for sender in crowd)
    while True:
        capacity = {sender: level * rate[sender] for sender in everyone}
        blocked = _overloaded(groups, [outgoing[group] for group in groups], capacity)
        if not blocked:
            break
        smaller = {sender for k in blocked for sender in groups[k]}
        inside = sum(outgoing[group] for group in groups if group <= smaller)
        raised = inside / sum(rate[sender] for sender in smaller)
        if raised <= level * (1 + 1e-12):
            break
        level, crowd, amount = raised, smaller, inside
    return _in_whole(amount, [rate[sender] for sender in crowd], level, quantum)


def _in_whole(amount: float, rates: Sequence[float], level: float, quantum: float) -> float:
    """Return the time in which senders pass `amount` bytes when each passes whole quanta."""
    if quantum <= 0 or len(rates) == 1:
        return level
    parts = [math.floor(level * rate / quantum + 1e-6) for rate in rates]
    for _ in range(round(amount / quantum) - sum(parts)):
        k = min(range(len(rates)), key=lambda j: (parts[j] + 1) / rates[j])
        parts[k] += 1
        level = max(level, parts[k] * quantum / rates[k])
    return level


def _overloaded(
    groups: list[frozenset[int]], amounts: list[float], passes: Mapping[int, float]
) -> list[int]:
    """Return the groups on the source side of a minimum cut; `passes`: bytes of each sender.

    Nodes: 0 source, 1.. groups, then senders, last sink. Empty when everything passes.
    """
    senders = sorted({sender for group in groups for sender in group})
    number = {sender: 1 + len(groups) + k for k, sender in enumerate(senders)}
    sink = 1 + len(groups) + len(senders)
    capacity: list[dict[int, float]] = [{} for _ in range(sink + 1)]
    for k, (group, amount) in enumerate(zip(groups, amounts, strict=True)):
        capacity[0][1 + k] = amount
        capacity[1 + k][0] = 0.0
        for sender in group:
            capacity[1 + k][number[sender]] = amount
            capacity[number[sender]][1 + k] = 0.0
    for sender in senders:
        capacity[number[sender]][sink] = passes[sender]
        capacity[sink][number[sender]] = 0.0
    tiny = 1e-12 * sum(amounts)
    while True:
        parent = _shortest_paths(capacity, tiny)
        if sink not in parent:
            break
        node, pushed = sink, float("inf")
        while node:
            pushed = min(pushed, capacity[parent[node]][node])
            node = parent[node]
        node = sink
        while node:
            capacity[parent[node]][node] -= pushed
            capacity[node][parent[node]] += pushed
            node = parent[node]
    return [k for k in range(len(groups)) if 1 + k in parent]


def _shortest_paths(capacity: list[dict[int, float]], tiny: float) -> dict[int, int]:
    """Return the predecessor of every node that residual capacity reaches from node 0."""
    parent, frontier = {0: 0}, deque([0])
    while frontier:
        node = frontier.popleft()
        for neighbour, room in capacity[node].items():
            if room > tiny and neighbour not in parent:
                parent[neighbour] = node
                frontier.append(neighbour)
    return parent
