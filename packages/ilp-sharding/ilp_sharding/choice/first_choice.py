"""First choices: a pass over the nodes, and the repair of a previous choice.

A backward sweep tells every strategy what it costs ahead: with n_j the earlier neighbours of j,

    h_i(k) = cost_i(k) + sum over later neighbours j of min_l [ theta_ij(k, l) + h_j(l) / n_j ],

and the sum of min h_i over the nodes without earlier neighbours is a bound on the cost of every
choice. Nodes are then settled in order: each takes the strategy of least h plus cost towards the
nodes already settled whose memory still leaves room for the least usage of everybody not yet
settled. A node left without one sends the pass back to the latest node to blame, which takes its
next best (conflict-directed backjumping, Prosser 1993) -> FirstChoice, greedy_start(). A choice
from an earlier, slightly different problem is settled the same way, keeping what still fits
-> repaired_choice(). Over a reduced network another pass removes, after every node, all strategies
without an allowed partner, as far as that reaches, and takes the next best where that empties a
node -> consistent_start().
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ilp_sharding.problem.instance import Instance, group_minimum
from ilp_sharding.problem.memory_rows import MemoryProfile, group_maximum, peak_times
from ilp_sharding.problem.reduction import Network

_AHEAD = 0.3  # of the time for a first choice, to look ahead
_JUMPS = 300  # back to a node to blame, before the pass gives up
_THRIFT = 1e3  # the price of the whole limit, of all costs, where memory comes first
_ALTERNATIVES = 4  # strategies tried at a node before the pass gives up


def greedy_start(
    instance: Instance, until: float = math.inf
) -> tuple[np.ndarray | None, float, bool]:
    """Return (choice [nodes] of finite cost within the limit or None, bound, whether none exists).

    Where memory stops the pass, a second one looks for the least memory. Each gives up once
    `time.perf_counter()` passes `until`.
    """
    first = FirstChoice(instance, 0.0, until)
    choice = first.settled(until)
    again = choice is None and first.short and not first.impossible
    if again and instance.limit > 0 and first.bound < math.inf:
        largest = max(abs(first.bound), float(np.abs(instance.cost[instance.cost < np.inf]).max()))
        price = _THRIFT * largest / instance.limit
        choice = FirstChoice(instance, price, until).settled(until)
    return choice, first.bound, first.impossible


def repaired_choice(
    instance: Instance, previous: Sequence[int], until: float = math.inf
) -> np.ndarray | None:
    """Return a feasible choice that keeps as much of `previous` as possible, or None."""
    return FirstChoice(instance, 0.0, until).settled(until, previous)


def consistent_start(
    network: Network,
    memory: MemoryProfile | None,
    until: float = math.inf,
    ahead: Mapping[tuple[int, int], np.ndarray] | None = None,
) -> dict[int, int] | None:
    """Return {open node: position} of a choice within the limit, or None if this pass fails too.

    `memory` is None without a limit. `ahead[node, other]` [strategies of node] is what each of them
    is taken to cost towards an unsettled `other` and beyond; if None, the least entry of its table.
    Gives up once `time.perf_counter()` passes `until`.
    """
    nodes = network.open_nodes()
    allowed: list[Mapping[int, np.ndarray]] = [{} for _ in range(network.num_nodes)]
    for node in nodes:  # as numbers: a product with a mask counts allowed partners
        if time.perf_counter() > until:
            return None
        allowed[node] = {
            other: (table < np.inf).astype(np.float32)
            for other, table in network.tables[node].items()
        }
    room = None if memory is None else _NetworkRoom(memory, until)
    if room is not None and room.left.min(initial=0.0) < 0:
        return None
    alive = {node: np.ones(len(network.cost[node]), bool) for node in nodes}
    chosen: dict[int, int] = {}
    for place, node in enumerate(nodes):
        if time.perf_counter() > until:
            return None
        open_here = alive[node] if room is None else alive[node] & room.fits(place)
        total = np.where(open_here, network.cost[node], np.inf)
        for other, table in network.tables[node].items():
            if other in chosen:
                total = total + table[:, chosen[other]]
            else:
                total = total + (table.min(1) if ahead is None else ahead[node, other])
        for strategy in np.argsort(total, kind="stable")[:_ALTERNATIVES].tolist():
            if not total[strategy] < np.inf:
                return None
            before = dict(alive)
            alive[node] = np.arange(len(total)) == strategy
            if _propagate(alive, allowed, [node]):
                chosen[node] = strategy
                break
            alive = before
        else:
            return None
        if room is not None:
            room.take(place, chosen[node])
    return chosen


def _propagate(
    alive: dict[int, np.ndarray],
    allowed: Sequence[Mapping[int, np.ndarray]],
    changed: Iterable[int],
) -> bool:
    """Drop from `alive` what has no allowed partner; return False once a node has nothing left."""
    waiting = dict.fromkeys(changed)
    while waiting:
        node = next(iter(waiting))
        del waiting[node]
        mask = alive[node].astype(np.float32)
        for other, table in allowed[node].items():
            kept = alive[other]
            rest = kept & (mask @ table > 0)
            count = np.count_nonzero(rest)
            if count < np.count_nonzero(kept):
                if not count:
                    return False
                alive[other] = rest
                waiting[other] = None
    return True


class FirstChoice:
    """A pass over `instance` with memory at `price` (cost per byte).

    `bound` is proven for price 0; `short` says whether memory excluded a strategy, `impossible`
    whether no choice is feasible. The look ahead takes up to a share of the time until `until`;
    nodes it does not come to send nothing.
    """

    def __init__(self, instance: Instance, price: float, until: float) -> None:
        self.instance = instance
        self.short = self.impossible = False
        offset, bounds = instance.offset.tolist(), instance.table_offset.tolist()
        cost = instance.cost if price == 0.0 else instance.cost + price * instance.memory
        self._ahead = [cost[a:b] for a, b in zip(offset, offset[1:], strict=False)]
        self._earlier: list[list[tuple[int, np.ndarray]]] = [[] for _ in self._ahead]
        for (a, b), start, stop in zip(instance.edges.tolist(), bounds, bounds[1:], strict=False):
            table = instance.table[start:stop].reshape(-1, len(self._ahead[b]))
            if a == b:
                self._ahead[a] = self._ahead[a] + table.diagonal()
            elif a < b:
                self._earlier[b].append((a, table))
            else:
                self._earlier[a].append((b, table.T))
        began = time.perf_counter()
        self.bound = self._look_ahead(began + _AHEAD * (until - began))

    def _look_ahead(self, until: float) -> float:
        """Add to the costs of all nodes what follows; return the bound."""
        ahead = self._ahead
        terms = []
        for node in range(len(ahead) - 1, -1, -1):
            earlier = self._earlier[node]
            if time.perf_counter() > until:  # what is not sent on, counts where it is
                terms += [float(part.min()) for part in ahead[: node + 1]]
                terms += [float(t.min()) for near in self._earlier[: node + 1] for _, t in near]
                break
            if not earlier:
                terms.append(float(ahead[node].min()))
                continue
            part = ahead[node] * (1.0 / len(earlier))
            for other, table in earlier:
                ahead[other] = ahead[other] + (table + part).min(1)
        total = math.fsum(terms)
        return total - 1e-12 * math.fsum(map(abs, terms)) if total < math.inf else math.inf

    def settled(self, until: float, previous: Sequence[int] = ()) -> np.ndarray | None:
        """Return a choice [nodes] that keeps what it can of `previous`, or None."""
        instance, earlier = self.instance, self._earlier
        num_nodes = len(earlier)
        room = _Room(instance) if math.isfinite(instance.limit) else None
        if room is not None and room.left.min(initial=0.0) < 0:
            self.impossible = True
            return None
        choice = [-1] * num_nodes
        tried: dict[int, list[int]] = {}
        blamed: dict[int, set[int]] = {}
        jumps = node = 0
        while node < num_nodes:
            if time.perf_counter() > until:
                return None
            total = self._ahead[node]
            for other, table in earlier[node]:
                total = total + table[choice[other]]
            blame = blamed.get(node, set())
            if room is not None:
                fits = room.fits(node)
                if fits is not None:
                    total = np.where(fits, total, np.inf)
                    self.short = True
                    blame = blame | {node - 1}
            if node in tried:
                total = total.copy()
                total[tried[node]] = np.inf
            wanted = previous[node] if node < len(previous) else -1
            if not (0 <= wanted < len(total) and total[wanted] < np.inf):
                wanted = int(total.argmin())
            if total[wanted] < np.inf:
                choice[node] = wanted
                if room is not None:
                    room.take(node, wanted)
                node += 1
                continue
            blame = (blame | {other for other, _ in earlier[node]}) - {-1}
            jumps += 1
            if not blame:  # whatever the others do
                self.impossible = True
            if not blame or jumps > _JUMPS:
                return None
            back = max(blame)
            for late in range(back, node):
                if room is not None:
                    room.give_back(late, choice[late])
            for late in range(back + 1, node + 1):
                tried.pop(late, None)
                blamed.pop(late, None)
            tried.setdefault(back, []).append(choice[back])
            blamed[back] = blamed.get(back, set()) | blame - {back}
            node = back
        found = np.array(choice, dtype=np.int64)
        return found if instance.objective(found) < math.inf else None


class _Room:
    """What is left of the limit at every peak time when all unsettled nodes use their least."""

    def __init__(self, instance: Instance) -> None:
        least = group_minimum(instance.memory, instance.offset)
        extra = instance.memory - np.repeat(least, np.diff(instance.offset))
        bounds = instance.offset.tolist()
        self._extra = [extra[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        self._most = group_maximum(extra, instance.offset).tolist()
        live = instance.start < instance.stop
        times = peak_times(instance.start[live], instance.stop[live])
        begin = np.searchsorted(times, instance.start)
        end = np.where(live, np.searchsorted(times, instance.stop), begin)
        changes = np.zeros(len(times) + 1)
        np.add.at(changes, begin[live], least[live])
        np.add.at(changes, end[live], -least[live])
        self.left = instance.limit - np.cumsum(changes)[: len(times)]
        # of every node, views that stay true while `left` changes in place
        spans = zip(begin.tolist(), end.tolist(), strict=True)
        self._left = [self.left[start:stop] for start, stop in spans]

    def fits(self, node: int) -> np.ndarray | None:
        """Return for each strategy of `node` whether it keeps the limit; None if all do."""
        lowest = self._left[node].min(initial=np.inf)
        return None if self._most[node] <= lowest else self._extra[node] <= lowest

    def take(self, node: int, strategy: int) -> None:
        """Settle `node` on `strategy`."""
        self._left[node] -= self._extra[node][strategy]

    def give_back(self, node: int, strategy: int) -> None:
        """Take back what `take` did."""
        self._left[node] += self._extra[node][strategy]


class _NetworkRoom:
    """The same for the open nodes of a reduced network, whose usage changes at several times.

    Left unfinished once `time.perf_counter()` passes `until`.
    """

    def __init__(self, memory: MemoryProfile, until: float) -> None:
        num_times = memory.num_times
        self.left = memory.slack.copy()
        self._blocks: list[tuple[np.ndarray, np.ndarray]] = []
        bounds = np.searchsorted(memory.strategy, memory.offset)
        for node, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if time.perf_counter() > until:
                return
            first, last = memory.offset[node : node + 2]
            times = np.array(sorted(set(memory.time[start:stop].tolist())), dtype=np.int64)
            column = np.searchsorted(times, memory.time[start:stop])
            extra = np.zeros((last - first, len(times)))  # usage from each time to the next
            changed = memory.strategy[start:stop] - first
            np.add.at(extra, (changed, column), memory.change[start:stop])
            extra = np.cumsum(extra, axis=1)
            least = extra.min(0)
            ends = np.append(times, num_times)
            for begin, end, usage in zip(ends, ends[1:], least, strict=False):
                self.left[begin:end] -= usage
            self._blocks.append((ends, extra - least))

    def fits(self, node: int) -> np.ndarray:
        """Return for each strategy of the open node at place `node` whether it keeps the limit."""
        ends, extra = self._blocks[node]
        if len(ends) < 2:
            return np.ones(len(extra), bool)
        return np.asarray((extra <= np.minimum.reduceat(self.left, ends[:-1])).all(1))

    def take(self, node: int, strategy: int) -> None:
        """Settle the node on `strategy`."""
        ends, extra = self._blocks[node]
        for begin, end, usage in zip(ends, ends[1:], extra[strategy], strict=False):
            self.left[begin:end] -= usage
