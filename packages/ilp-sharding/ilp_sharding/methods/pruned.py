"""Wide graphs without memory rows made narrow by message bounds, in this process.

Messages (see `pruned_sweeps`) give a bound B, choices, and a reduced cost r_v of every strategy v:
each choice that uses v costs at least B + r_v. Where strategies that no better choice can use are
gone and what is left is narrow, elimination ends it. Else, for any guess C of the optimum, the
strategies with B + r_v > C may be left out; let v(C) be the optimum of what is left. Every choice
left out costs more than C, so

    v(C) <= C  =>  v(C) is the optimum;          else  the optimum > C, and v(C) is a choice's cost.

C is chosen so that a few strategies of each node are left; that choice is often the best, and with
its cost more strategies drop out than with that of any decoded from messages. A gap that many
sweeps leave comes from a few nodes with many neighbours: branching on those closes it.
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
_ALWAYS = 60  # sweeps, of a graph however large; further rounds
_SWEPT = 4e8  # only while all sweeps together visited fewer table entries
_MORE = 100  # strategies that a guess leaves beside those per node
_NARROW = 1e5  # table entries up to which an order of elimination is planned
_AT_ONCE = 3e7  # table entries that are visited between two looks at the clock
_LEAST_RISE = 1e-9  # relative, of a guess over the bound


def solve_pruned(
    graph: TableGraph, expand: Callable[[np.ndarray], np.ndarray], search: Search
) -> TableGraph | None:
    """Return what is left of `graph`, which has no memory rows; None if it is solved.

    Bound and best choice go into `search` in any case. `expand` makes a whole choice of labels
    [base nodes]. Raises NoAssignment if every choice is forbidden.
    """
    rest = sweeps.rest_of(graph)
    allowed = graph.tables.cost < np.inf
    some = bool(allowed.all() and not rest.size[2]) or sweeps.keep(rest, allowed)
    solved = not some or _solved(rest, search)
    if rest.numbers[sweeps.OBJECTIVE] < math.inf:
        search.offer(expand(rest.choice), "messages")
    if not solved:
        return sweeps.graph_of(rest)
    if search.choice is None:
        raise NoAssignment
    search.raise_bound(search.objective, "messages")
    return None


def _solved(rest: Rest, search: Search) -> bool:
    """Return whether the best choice of `rest`, or that of `search` if it is better, is proved."""
    swept = 0
    for one in _ROUNDS:
        if swept >= _ALWAYS and rest.numbers[sweeps.VISITED] > _SWEPT:
            return False
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
    solved = _branched(rest, search)
    search.raise_bound(_bound(rest), "branching")
    return solved


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
    while waiting and visited < _BRANCHED and not search.late:
        part = waiting.pop()
        part.numbers[sweeps.VISITED] = 0.0
        if numbers[sweeps.OBJECTIVE] < part.numbers[sweeps.OBJECTIVE]:
            part.numbers[sweeps.OBJECTIVE] = numbers[sweeps.OBJECTIVE]
        ended = _climb(part, _BRANCH_SWEEPS, search)
        visited += part.numbers[sweeps.VISITED] + _PART_ENTRIES
        if ended == sweeps.OPEN and _eliminated(part, _BRANCH_WORK):
            ended = sweeps.PROVED
        if part.numbers[sweeps.OBJECTIVE] < numbers[sweeps.OBJECTIVE]:
            numbers[sweeps.OBJECTIVE] = part.numbers[sweeps.OBJECTIVE]
            rest.choice[:] = part.choice
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
    inner = sweeps.copied(rest)
    inner.numbers[sweeps.BOUND] = -math.inf
    bound = guess
    if sweeps.keep(inner, costs <= guess):
        ended = sweeps.climb(inner, one.inner, guess)
        if ended == sweeps.OPEN:
            _eliminated(inner, one.work)
        if ended != sweeps.EMPTY:
            bound = min(guess, float(inner.numbers[sweeps.BOUND]))
    if inner.numbers[sweeps.OBJECTIVE] < numbers[sweeps.OBJECTIVE]:
        numbers[sweeps.OBJECTIVE] = inner.numbers[sweeps.OBJECTIVE]
        rest.choice[:] = inner.choice
    numbers[sweeps.BOUND] = max(float(numbers[sweeps.BOUND]), bound)
    known = min(float(numbers[sweeps.OBJECTIVE]), search.objective)
    proved = known - float(numbers[sweeps.BOUND]) <= sweeps.ROUNDING * abs(known)
    return known < math.inf and proved


def run_sample(graph: TableGraph) -> None:
    """Call every loop, on a small `graph`."""
    rest = sweeps.rest_of(graph)
    sweeps.keep(rest, graph.label < 3)
    _eliminated(rest, math.inf)
    sweeps.climb(rest, 1, math.inf)
