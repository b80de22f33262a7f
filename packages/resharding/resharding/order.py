r"""Which holder sends each job, and in which order the jobs are issued.

Variables: a sequence of (job j, sender s in senders_j). Each pair occupies a set of *lanes*, the
hosts (or devices) that cannot do two operations at once, for T_j seconds. A job starts when all its
lanes are free: start = max {free_l}, then free_l = start + T_j (arXiv 2211.05322, section 3; the
`evaluate_one_solution` of its code). Minimise the makespan max_l free_l.

    lower bound: every lane's unavoidable load, and the shared load of sender sets
        -> makespan_bound()
    list scheduling: always the pair that can start first; among those the one with the most loaded
        lanes, so that no critical lane idles; repeated with seeded noise
        -> greedy_order()
    exact search over active schedules (Giffler and Thompson): some job that shares a lane with the
        earliest-finishing pair must start before that pair would finish; nodes are cut by
        free_l + remaining unavoidable load of l, which never overestimates
        -> exact_order()

Durations are those of the slices themselves; searches are limited by counts, never by the clock, so
equal input gives an equal plan everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from resharding.minimum_cut import send_seconds

_MOST_JOBS = 48  # more are bundled before they are ordered: a step takes 60 us and more


@frozen(kw_only=True)
class Job:
    """One operation to place: any of `senders` (devices) feeds all of `receivers` (devices)."""

    seconds: float
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


@frozen(kw_only=True)
class Order:
    """Jobs in issue order with the chosen sender devices, and the makespan of the lane model."""

    sequence: tuple[tuple[int, int], ...]  # (job, sender device)
    seconds: float


class _Pairs:
    """All (job, sender) pairs as arrays over lanes."""

    def __init__(self, jobs: Sequence[Job], lane_of: dict[int, int], receivers_block: bool) -> None:
        self.jobs = jobs
        self.job: NDArray[np.int64] = np.array(
            [j for j, job in enumerate(jobs) for _ in job.senders], dtype=np.int64
        )
        self.sender = [sender for job in jobs for sender in job.senders]
        devices = sorted({d for job in jobs for d in (*job.senders, *job.receivers)})
        lanes = sorted({lane_of[device] for device in devices})
        lane_number = {lane: k for k, lane in enumerate(lanes)}
        device_number = {device: k for k, device in enumerate(devices)}
        self.seconds: NDArray[np.float64] = np.array([jobs[j].seconds for j in self.job])
        self.lanes = np.zeros((len(self.job), len(lanes)), dtype=bool)
        self.devices = np.zeros((len(self.job), len(devices)), dtype=bool)
        for row, (j, sender) in enumerate(zip(self.job, self.sender, strict=True)):
            for device in (sender, *(jobs[j].receivers if receivers_block else ())):
                self.lanes[row, lane_number[lane_of[device]]] = True
            for device in (sender, *jobs[j].receivers):
                self.devices[row, device_number[device]] = True
        self.unavoidable = np.array(  # [job, lane]: lanes every choice of sender occupies
            [self.lanes[self.job == j].all(axis=0) for j in range(len(jobs))]
        ).reshape(len(jobs), len(lanes))


def makespan_bound(pairs: _Pairs) -> float:
    """Return seconds that no order and choice of senders can beat."""
    seconds = np.array([job.seconds for job in pairs.jobs])
    busiest = float((pairs.unavoidable * seconds[:, None]).sum(axis=0).max(initial=0.0))
    shared: dict[frozenset[int], float] = {}
    for j, job in enumerate(pairs.jobs):
        extra = [
            np.flatnonzero(pairs.lanes[row] & ~pairs.unavoidable[j])
            for row in np.flatnonzero(pairs.job == j)
        ]
        if all(len(lanes) for lanes in extra):
            group = frozenset(int(lane) for lanes in extra for lane in lanes)
        else:
            group = frozenset(int(lane) for lane in np.flatnonzero(pairs.unavoidable[j]))
        shared[group] = shared.get(group, 0.0) + job.seconds
    lanes = {lane for group in shared for lane in group}
    return max(busiest, send_seconds(shared, dict.fromkeys(lanes, 1.0)))


def find_order(
    jobs: Sequence[Job],
    lane_of: dict[int, int],
    *,
    receivers_block: bool = True,
    seed: int = 0,
    num_restarts: int = 8,
    node_limit: int = 400,
    shake: int | None = None,
    unordered: bool = False,
) -> Order:
    """Return the best order found: greedy restarts, then the exact search while nodes last.

    Large problems get fewer restarts and nodes, so that the work stays about the same. With `shake`
    the answer is one randomised list schedule of that number, for a caller with its own measure;
    `unordered` only balances senders.
    """
    if not jobs:
        return Order(sequence=(), seconds=0.0)
    if unordered:
        return _unordered(jobs, lane_of)
    if len(jobs) > _MOST_JOBS:
        return _order_of_bundles(jobs, lane_of, receivers_block)
    pairs = _Pairs(jobs, lane_of, receivers_block)
    if shake is not None:
        return greedy_order(pairs, np.random.default_rng((seed, shake)))
    best = greedy_order(pairs, None)
    if not num_restarts and not node_limit:
        return best
    bound = makespan_bound(pairs)
    random = np.random.default_rng(seed)
    for _ in range(min(num_restarts, 1 + 64 // len(jobs))):
        if best.seconds <= bound * (1 + 1e-9):
            return best
        found = greedy_order(pairs, random)
        best = min(best, found, key=lambda order: order.seconds)
    if node_limit and best.seconds > bound * (1 + 1e-9):
        best = exact_order(pairs, best, bound, node_limit * 8 // max(8, len(jobs)))
    return best


def _unordered(jobs: Sequence[Job], lane_of: dict[int, int]) -> Order:
    """Return jobs as they come, each from the sender that has sent the least so far."""
    lane_load: dict[int, float] = {}
    device_load: dict[int, float] = {}
    sequence = []
    for j, job in enumerate(jobs):
        sender = min(
            job.senders,
            key=lambda d: (lane_load.get(lane_of[d], 0.0), device_load.get(d, 0.0)),
        )
        lane = lane_of[sender]
        lane_load[lane] = lane_load.get(lane, 0.0) + job.seconds
        device_load[sender] = device_load.get(sender, 0.0) + job.seconds
        sequence.append((j, sender))
    return Order(sequence=tuple(sequence), seconds=0.0)


def _order_of_bundles(jobs: Sequence[Job], lane_of: dict[int, int], receivers_block: bool) -> Order:
    """Return a list schedule of bundles of jobs that choose from and occupy the same lanes."""
    alike: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
    for j, job in enumerate(jobs):
        sending = frozenset(lane_of[device] for device in job.senders)
        feeding = frozenset(lane_of[device] for device in job.receivers)
        alike.setdefault((sending, feeding), []).append(j)
    size = -(-len(jobs) // _MOST_JOBS)
    bundles = [
        members[k : k + size] for members in alike.values() for k in range(0, len(members), size)
    ]
    merged = [
        Job(
            seconds=sum(jobs[j].seconds for j in members),
            senders=jobs[members[0]].senders,
            receivers=jobs[members[0]].receivers,
        )
        for members in bundles
    ]
    order = greedy_order(_Pairs(merged, lane_of, receivers_block), None)
    load: dict[int, float] = {}
    sequence = []
    for number, chosen in order.sequence:
        for j in bundles[number]:
            beside = [d for d in jobs[j].senders if lane_of[d] == lane_of[chosen]]
            sender = min(beside, key=lambda device: load.get(device, 0.0))
            load[sender] = load.get(sender, 0.0) + jobs[j].seconds
            sequence.append((j, sender))
    return Order(sequence=tuple(sequence), seconds=order.seconds)


def greedy_order(pairs: _Pairs, random: np.random.Generator | None) -> Order:
    """Return a list schedule; with `random`, ties and near-ties of the lane loads are shaken."""
    free = np.zeros(pairs.lanes.shape[1])
    device_free = np.zeros(pairs.devices.shape[1])
    lane_load = np.zeros(pairs.lanes.shape[1])
    seconds = np.array([job.seconds for job in pairs.jobs])
    remaining = (pairs.unavoidable * seconds[:, None]).sum(axis=0)
    alive = np.ones(len(pairs.job), dtype=bool)
    sequence = []
    for _ in range(len(pairs.jobs)):
        rows = np.flatnonzero(alive)
        lanes = pairs.lanes[rows]
        start = (lanes * free).max(axis=1, initial=0.0)
        pick = start <= start.min() * (1 + 1e-12)
        rows, lanes = rows[pick], lanes[pick]
        urgency = (lanes * remaining).max(axis=1, initial=0.0) + 1e-3 * pairs.seconds[rows]
        if random is not None:
            urgency = urgency * random.uniform(0.7, 1.0, size=len(rows))
        pick = urgency >= urgency.max() * (1 - 1e-12)
        rows, lanes = rows[pick], lanes[pick]
        if len(rows) > 1:
            waits = (pairs.devices[rows] * device_free).sum(axis=1)
            waits += (lanes * lane_load).sum(axis=1)
            rows = rows[waits <= waits.min() * (1 + 1e-12)]
        row = int(rows[0])
        j = int(pairs.job[row])
        begin = float((pairs.lanes[row] * free).max(initial=0.0))
        free[pairs.lanes[row]] = begin + pairs.seconds[row]
        lane_load[pairs.lanes[row]] += pairs.seconds[row]
        device_free[pairs.devices[row]] += pairs.seconds[row]
        remaining = remaining - pairs.unavoidable[j] * pairs.seconds[row]
        alive[pairs.job == j] = False
        sequence.append((j, pairs.sender[row]))
    return Order(sequence=tuple(sequence), seconds=float(free.max(initial=0.0)))


def exact_order(pairs: _Pairs, incumbent: Order, bound: float, node_limit: int) -> Order:
    """Return an order no worse than `incumbent`: the best one if the nodes last."""
    search = _Search(pairs, incumbent, bound, node_limit)
    search.explore([0.0] * pairs.lanes.shape[1], search.load, [])
    return search.best


class _Search:
    def __init__(self, pairs: _Pairs, incumbent: Order, bound: float, node_limit: int) -> None:
        self.pairs, self.best, self.bound, self.nodes = pairs, incumbent, bound, node_limit
        self.options: list[list[tuple[tuple[int, ...], int]]] = []  # job -> (lanes, sender)
        for j in range(len(pairs.jobs)):
            seen: dict[tuple[int, ...], int] = {}
            for row in np.flatnonzero(pairs.job == j):
                lanes = tuple(int(lane) for lane in np.flatnonzero(pairs.lanes[row]))
                seen.setdefault(lanes, pairs.sender[row])
            self.options.append(list(seen.items()))
        self.forced = [
            tuple(int(lane) for lane in np.flatnonzero(row)) for row in pairs.unavoidable
        ]
        self.load = [0.0] * pairs.lanes.shape[1]
        for job, lanes in zip(pairs.jobs, self.forced, strict=True):
            for lane in lanes:
                self.load[lane] += job.seconds
        self.open = set(range(len(pairs.jobs)))

    def explore(
        self, free: list[float], load: list[float], sequence: list[tuple[int, int]]
    ) -> None:
        """Branch from a partial sequence; `load` is the unavoidable work left per lane."""
        if not self.open:
            seconds = max(free)
            if seconds < self.best.seconds * (1 - 1e-12):
                self.best = Order(sequence=tuple(sequence), seconds=seconds)
            return
        if self._hopeless(free, load):
            return
        self.nodes -= 1
        for start, lanes, j, sender in self._branches(free):
            if self.nodes <= 0 or self.best.seconds <= self.bound * (1 + 1e-9):
                return
            after, left = free.copy(), load.copy()
            for lane in lanes:
                after[lane] = start + self.pairs.jobs[j].seconds
            for lane in self.forced[j]:
                left[lane] -= self.pairs.jobs[j].seconds
            self.open.remove(j)
            self.explore(after, left, [*sequence, (j, sender)])
            self.open.add(j)

    def _hopeless(self, free: list[float], load: list[float]) -> bool:
        limit = self.best.seconds * (1 - 1e-12)
        return any(a + b >= limit for a, b in zip(free, load, strict=True))

    def _branches(self, free: list[float]) -> list[tuple[float, tuple[int, ...], int, int]]:
        """Return (start, lanes, job, sender) of pairs, one of which is next in some best order."""
        pairs = [
            (max((free[lane] for lane in lanes), default=0.0), lanes, j, sender)
            for j in sorted(self.open)
            for lanes, sender in self.options[j]
        ]
        first = min(pairs, key=lambda pair: pair[0] + self.pairs.jobs[pair[2]].seconds)
        end, shared = first[0] + self.pairs.jobs[first[2]].seconds, set(first[1])
        rivals = [pair for pair in pairs if pair[0] < end and not shared.isdisjoint(pair[1])]
        return sorted(rivals, key=lambda pair: (pair[0], -self.pairs.jobs[pair[2]].seconds))
