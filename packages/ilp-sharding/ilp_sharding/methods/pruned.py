"""Wide graphs without memory rows made narrow by message bounds, in this process.

Messages (see `pruned_sweeps`) give a bound B, choices, and a reduced cost r_v of every strategy v:
each choice that uses v costs at least B + r_v. Where strategies that no better choice can use are
gone and what is left is narrow, elimination ends it. Else, for any guess C of the optimum, the
strategies with B + r_v > C may be left out; let v(C) be the optimum of what is left. Every choice
left out costs more than C, so

    v(C) <= C  =>  v(C) is the optimum;          else  the optimum > C, and v(C) is a choice's cost.

C is chosen so that a few strategies of each node are left; that choice is often the best, and with
its cost more strategies drop out than with that of any decoded from messages. Where that does not
end soon, better choices are looked for (-> _look_around()). A gap that many sweeps leave comes from
a few nodes with many neighbours: branching on those closes it.
-> solve_pruned()
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from attrs import frozen

from ilp_sharding.bound import pruned_sweeps as sweeps
from ilp_sharding.bound.pruned_sweeps import Rest
from ilp_sharding.exact.graph_elimination import eliminate
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.problem.flat_graph import TableGraph
from ilp_sharding.search import Search


@frozen
class _Round:
    """Of one round: sweeps over all that is left; of a guess the strategies that it leaves per node
    and the sweeps over these; table entries of an elimination."""

    sweeps: int
    strategies: float
    inner: int
    work: float


# Of 890 problems of planning GPT-39B, LLaMA-8B and GPT-1.3B all but three end in a round of these,
# nine of ten in the first three. With two strategies per node in every round, the 193 that take
# longest take a seventh longer.
_ROUNDS = (
    *(_Round(8, 2.0, 12, 2e5) for _ in range(2)),
    _Round(8, 3.0, 12, 2e6),
    _Round(16, 4.0, 12, 2e6),
    _Round(20, 4.0, 30, 5e6),
    _Round(40, 5.0, 30, 5e6),
    *(_Round(60, 6.0, 30, 1e7) for _ in range(2)),
    *(_Round(60, 8.0, 30, 1e7) for _ in range(2)),
)
# Branching proves the three others in 0.04-0.17 CPU s, where the reductions, messages once more and
# rounds of a search took 0.7 s and left a gap. Earlier it costs more: a problem that 190 sweeps
# prove takes six times as long if 40 come before.
_BRANCHED = 4e8  # table entries that all its parts may visit,
_PART_ENTRIES = 3e4  # and of each part those that its arrays stand for
_BRANCH_SWEEPS = 10
_BRANCH_WORK = 1e6  # table entries of the elimination of a part
_BRANCH_TABLES = 3e5  # table entries of the whole up to which parts are copied
# The share of `_BRANCHED` where a choice may be off by a tolerance, whose proof nobody asks for;
# with all of it, and branching on the reduced problem too, MoE-10B takes 60 instead of 50 CPU s.
_ROUGH = 0.25
# Rounds after which a choice within the gap tolerance is enough, and other choices are looked for:
# most problems end before. Planning MoE-10B on 2 x 8 V100 takes 85 CPU s with 3, 63 with 6 and 60
# with 8 (70 without looking).
_EASY = 8
_START_ROUNDS = 4  # of the rounds, for choices on few axes: small problems, proved in 30 ms
# Conditioning: the share of nodes that keep their strategies, at first and each time more, until
# the elimination of the others visits few enough table entries; changes without gain that end it.
# With 3e5 to 1e7 entries the same problems of MoE-10B get choices within 2 % of one another;
# a change takes 1 to 4 ms, and nearly all gain comes in the first 60.
_KEPT, _MORE_KEPT = 0.1, 1.2
_CONDITIONED_WORK = 1e6
_IDLE = 10
_ALWAYS = 60  # sweeps, of a graph however large; further rounds
_SWEPT = 4e8  # only while all sweeps together visited fewer table entries
_MORE = 100  # strategies that a guess leaves beside those per node
_NARROW = 1e5  # table entries up to which an order of elimination is planned
_AT_ONCE = 3e7  # table entries that are visited between two looks at the clock
_LEAST_RISE = 1e-9  # relative, of a guess over the bound


def solve_pruned(
    graph: TableGraph,
    expand: Callable[[np.ndarray], np.ndarray],
    search: Search,
    axis_bits: np.ndarray | None = None,
) -> TableGraph | None:
    """Return what is left of `graph`, which has no memory rows; None if it is solved.

    Bound and best choice go into `search` in any case; what is within its gap tolerance after the
    rounds that end most problems is solved. `expand` makes a whole choice of labels
    [base nodes]. `axis_bits` [strategies]: the mesh axes that each uses. Raises NoAssignment if
    every choice is forbidden.
    """
    rest = sweeps.rest_of(graph)
    allowed = graph.tables.cost < np.inf
    some = bool(allowed.all() and not rest.size[2]) or sweeps.keep(rest, allowed)
    axes = None if axis_bits is None else _Axes(graph.tables.offset.copy(), axis_bits)
    solved = not some or _solved(rest, search, axes)
    if rest.numbers[sweeps.OBJECTIVE] < math.inf:
        search.offer(expand(rest.choice), "messages")
    if not solved and not search.closed:
        return sweeps.graph_of(rest)
    if search.choice is None:
        raise NoAssignment
    if solved:
        search.raise_bound(search.objective, "messages")
    return None


def _solved(rest: Rest, search: Search, axes: _Axes | None) -> bool:
    """Return whether the best choice of `rest`, or that of `search` if it is better, is proved."""
    swept = 0
    for number, one in enumerate(_ROUNDS):
        if swept >= _ALWAYS and rest.numbers[sweeps.VISITED] > _SWEPT:
            return False
        if number >= _EASY and _is_close(rest, search):
            return False
        if number == _EASY and not search.bound_only:
            _look_around(rest, search, axes)
        swept += one.sweeps
        ended = _climb(rest, one.sweeps, search)
        if ended != sweeps.OPEN:
            return True
        search.raise_bound(_bound(rest), "messages")
        if search.late:
            return False
        if _eliminated(rest, one.work) or _guessed(rest, one, search):
            return True
        search.raise_bound(_bound(rest), "narrowing")
    if search.branched:  # as it was, before the reductions
        return False
    search.branched = True
    solved = _branched(rest, search)
    search.raise_bound(_bound(rest), "branching")
    return solved


def _is_close(rest: Rest, search: Search) -> bool:
    """Return whether the best choice is within the gap tolerance."""
    least = min(float(rest.numbers[sweeps.OBJECTIVE]), search.objective)
    return least < math.inf and search.closes(least, _bound(rest))


@frozen(eq=False)
class _Axes:
    """The mesh axes that strategies use: those of base node i are at `offset[i]` of `bits`."""

    offset: np.ndarray
    bits: np.ndarray

    def of(self, rest: Rest) -> np.ndarray:
        """Return those of the strategies left."""
        n = int(rest.size[0])
        sizes = np.diff(rest.tables.offset[: n + 1])
        start = np.repeat(self.offset[rest.base_node[:n]], sizes)
        found: np.ndarray = self.bits[start + rest.label[: len(start)]]
        return found

    def subsets(self, rest: Rest) -> list[np.ndarray]:
        """Return [strategies left] which use no axis but one, all but one, or all or none."""
        bits = self.of(rest)
        used = int(np.bitwise_or.reduce(bits, initial=0))
        each = [1 << k for k in range(used.bit_length()) if used >> k & 1]
        some = sorted({*each, *(used - one for one in each)} - {0, used})
        together = [(bits == 0) | (bits == used)] if some else []
        return [*(bits & ~one == 0 for one in some), *together]


def _look_around(rest: Rest, search: Search, axes: _Axes | None) -> None:
    """Look for a better choice of `rest`, also from those that use few mesh axes.

    Messages and small changes do not come from a choice that uses all axes to one that leaves some
    idle: nearly all nodes change together. Of MoE-10B on 2 x 8 V100 many parts are best on the axis
    inside hosts alone, since there is much to exchange: the selection problems of its rows that
    stay open cost up to 15 % less so.
    """
    random = np.random.default_rng(search.seed)
    masks = [] if axes is None else axes.subsets(rest)
    starts = [_start(rest, search, mask) for mask in masks]
    for start in [sweeps.copied(rest), *starts]:
        if start.numbers[sweeps.OBJECTIVE] < math.inf:
            _condition(start, search, random)
            _take_from(rest, start)


def _start(rest: Rest, search: Search, mask: np.ndarray) -> Rest:
    """Return `rest` with the best choice found of the strategies of a mask, if there is any."""
    part, start = sweeps.copied(rest), sweeps.copied(rest)
    start.numbers[sweeps.OBJECTIVE] = part.numbers[sweeps.OBJECTIVE] = math.inf
    part.numbers[sweeps.BOUND] = -math.inf
    if sweeps.keep(part, mask.copy()):
        if not part.size[0]:
            sweeps.take(part, np.zeros(0, dtype=np.int64), part.numbers[sweeps.CONSTANT])
        for one in _ROUNDS[:_START_ROUNDS] if part.size[0] else ():
            if _climb(part, one.sweeps, search) != sweeps.OPEN:
                break
            if _eliminated(part, one.work) or _guessed(part, one, search):
                break
        _take_from(start, part)
    return start


def _condition(rest: Rest, search: Search, random: np.random.Generator) -> None:
    """Improve the best choice of `rest`: few nodes, with many neighbours, keep their strategies,
    which leaves so narrow a graph that an elimination finds the best of all others, some
    milliseconds; then other few (cutset conditioning: Pearl 1988, section 4.3).
    """
    n, m = int(rest.size[0]), int(rest.size[1])
    offset, degree = rest.tables.offset[: n + 1], np.diff(rest.tables.incident_offset[: n + 1])
    owner = np.repeat(np.arange(n), np.diff(offset))
    first, second = rest.tables.first[:m], rest.tables.second[:m]
    entries = np.diff(rest.tables.entry_offset[: m + 1])
    some_forbidden = bool(rest.size[2])  # then fewer entries may be left than are counted
    kept, idle = _KEPT, 0
    while idle < _IDLE and not search.late and not _is_close(rest, search):
        chosen = rest.label[: len(owner)] == rest.choice[rest.base_node[:n]][owner]
        order = np.argsort(-degree * random.random(n))
        while True:
            fixed = np.zeros(n, dtype=bool)
            fixed[order[: 1 + int(kept * n)]] = True
            left = entries[~(fixed[first] | fixed[second])].sum()
            if left > _NARROW and not some_forbidden:
                kept *= _MORE_KEPT
                continue
            some, part = sweeps.part_of(rest, chosen | ~fixed[owner])
            if not some:
                return  # the choice has strategies that were dropped
            part.numbers[sweeps.OBJECTIVE] = math.inf
            if not part.size[0]:
                sweeps.take(part, np.zeros(0, dtype=np.int64), part.numbers[sweeps.CONSTANT])
            if not part.size[0] or _eliminated(part, _CONDITIONED_WORK):
                break
            kept *= _MORE_KEPT
        kept /= _MORE_KEPT
        before = float(rest.numbers[sweeps.OBJECTIVE])
        _take_from(rest, part)
        idle = (
            0 if rest.numbers[sweeps.OBJECTIVE] < before - _LEAST_RISE * abs(before) else idle + 1
        )


def _take_from(rest: Rest, part: Rest) -> None:
    """Note the best choice of a part of `rest`."""
    if part.numbers[sweeps.OBJECTIVE] < rest.numbers[sweeps.OBJECTIVE]:
        rest.numbers[sweeps.OBJECTIVE] = part.numbers[sweeps.OBJECTIVE]
        rest.choice[:] = part.choice


def _branched(rest: Rest, search: Search) -> bool:
    """Return whether branching on the nodes with most neighbours proves the best choice.

    Such a node takes its strategy of least reduced cost, or another one; parts are searched depth
    first, and go on from the messages of the whole.
    """
    numbers = rest.numbers
    if rest.tables.entry_offset[rest.size[1]] > _BRANCH_TABLES:
        return False
    waiting = [sweeps.copied(rest)]
    visited = 0.0
    most = _BRANCHED * (_ROUGH if search.gap_tolerance else 1.0)
    while waiting and visited < most and not search.late:
        part = waiting.pop()
        part.numbers[sweeps.VISITED] = 0.0
        if numbers[sweeps.OBJECTIVE] < part.numbers[sweeps.OBJECTIVE]:
            part.numbers[sweeps.OBJECTIVE] = numbers[sweeps.OBJECTIVE]
        ended = _climb(part, _BRANCH_SWEEPS, search)
        visited += part.numbers[sweeps.VISITED] + _PART_ENTRIES
        if ended == sweeps.OPEN and _eliminated(part, _BRANCH_WORK):
            ended = sweeps.PROVED
        _take_from(rest, part)
        if ended != sweeps.OPEN:
            continue
        node = int(np.argmax(np.diff(part.tables.incident_offset[: part.size[0] + 1])))
        own = slice(part.tables.offset[node], part.tables.offset[node + 1])
        best = own.start + int(np.argmin(part.reduced[own]))
        others = np.ones(int(part.tables.offset[part.size[0]]), dtype=bool)
        others[best] = False
        one = others.copy()
        one[own] = ~others[own]
        child = sweeps.copied(part)
        if sweeps.keep(part, others):
            waiting.append(part)
        if sweeps.keep(child, one):
            waiting.append(child)
    bounds = [float(part.numbers[sweeps.BOUND]) for part in waiting]
    known = min(float(numbers[sweeps.OBJECTIVE]), search.objective)
    numbers[sweeps.BOUND] = max(float(numbers[sweeps.BOUND]), min([*bounds, known]))
    return not waiting


def _bound(rest: Rest) -> float:
    """Return a bound of all choices: no better than the best known, to rounding."""
    known = float(rest.numbers[sweeps.OBJECTIVE])
    if known < math.inf:
        known -= sweeps.MARGIN * abs(known)
    return min(float(rest.numbers[sweeps.BOUND]), known)


def _climb(rest: Rest, steps: int, search: Search) -> int:
    """Raise the bound by so many steps, with looks at the clock; return how that ended."""
    while steps > 0 and not search.late:
        entries = int(rest.tables.entry_offset[rest.size[1]])
        some = min(steps, max(1, int(_AT_ONCE / max(2 * entries, 1))))
        ended: int = sweeps.climb(rest, some, search.cutoff())
        if ended != sweeps.OPEN:
            return ended
        steps -= some
    return sweeps.OPEN


def _eliminated(rest: Rest, work: float) -> bool:
    """Return whether an elimination finds the best choice of `rest`, in so many table entries."""
    tables = sweeps.left(rest)
    if len(tables.entry) > _NARROW:
        return False
    x = np.zeros(len(tables.offset) - 1, dtype=np.int64)
    cost = eliminate(tables, work, x) + rest.numbers[sweeps.CONSTANT]
    if math.isnan(cost):
        return False
    sweeps.take(rest, x, cost)
    rest.numbers[sweeps.BOUND] = cost
    return True


def _guessed(rest: Rest, one: _Round, search: Search) -> bool:
    """Return whether a guess of the optimum is proved; its choice and bound go into `rest`."""
    numbers = rest.numbers
    num_nodes = int(rest.size[0])
    costs = numbers[sweeps.REDUCED] + rest.reduced[: rest.tables.offset[num_nodes]]
    kept = min(int(one.strategies * num_nodes) + _MORE, len(costs) - 1)
    least = numbers[sweeps.BOUND] + _LEAST_RISE * abs(numbers[sweeps.BOUND])
    most = min(float(numbers[sweeps.OBJECTIVE]), search.cutoff())
    guess = min(max(float(np.partition(costs, kept)[kept]), least), most)
    bound = guess
    some, inner = sweeps.part_of(rest, costs <= guess)
    if some:
        inner.numbers[sweeps.BOUND] = -math.inf
        ended = sweeps.climb(inner, one.inner, guess)
        if ended == sweeps.OPEN:
            _eliminated(inner, one.work)
        if ended != sweeps.EMPTY:
            bound = min(guess, float(inner.numbers[sweeps.BOUND]))
        _take_from(rest, inner)
    numbers[sweeps.BOUND] = max(float(numbers[sweeps.BOUND]), bound)
    known = min(float(numbers[sweeps.OBJECTIVE]), search.objective)
    proved = known - float(numbers[sweeps.BOUND]) <= sweeps.ROUNDING * abs(known)
    return known < math.inf and proved


def run_sample(graph: TableGraph) -> None:
    """Call every loop, on a small `graph`."""
    rest = sweeps.rest_of(graph)
    sweeps.part_of(rest, graph.label < 3)
    sweeps.keep(rest, graph.label < 3)
    _eliminated(rest, math.inf)
    sweeps.climb(rest, 1, math.inf)
