"""Exact solution of problems whose graph is narrow or small, in this process.

1. Without the memory rows, elimination gives the optimum and is a bound with them. If it keeps the
   rows, it is the optimum -> _solved().
2. Otherwise multipliers lambda_t >= 0 price the rows,

       L(lambda) = min_x [ cost(x) + sum_t lambda_t (usage_t(x) - slack_t) ]  <=  optimum,

   each value by one elimination, maximised by cutting planes -> raise_bound(). Its minimisers,
   repaired, are choices that fit.
3. The min-marginals of the best multipliers bound every choice that uses a strategy; strategies
   whose bound exceeds the best choice go -> fix_strategies().
4. HiGHS solves what is left -> integer_program.
"""

from __future__ import annotations

import math

import numpy as np

from ilp_sharding.bound.cutting_planes import highest_point
from ilp_sharding.choice.row_repair import LocalMoves
from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exact.integer_program import IntegerProgram
from ilp_sharding.exceptions import NoAssignment, OutOfTime
from ilp_sharding.methods.reduced import Reduced, prove_infeasible
from ilp_sharding.problem.memory_rows import (
    DENSE_USAGE,
    MemoryProfile,
    binding_rows,
    violated_peaks,
)
from ilp_sharding.problem.reduction import Network
from ilp_sharding.search import Search

ELIMINATION_WORK = 3e7  # table entries that one in-process elimination may visit
ELIMINATION_SECONDS = 4e-9  # per entry of the tables
PRICING_WORK = 2e6  # likewise where some tens of eliminations are needed
PROGRAM_TABLES = 2e4  # table entries up to which HiGHS finishes in this process
# Likewise without a memory limit: of 16,000 entries, messages (`narrowing`) solve in 0.01-0.1 CPU s
# what takes HiGHS 0.7-14 s, but their loops take 2.7 s to load.
FREE_PROGRAM_TABLES = 2e3
PROGRAM_SECONDS = 3e-6  # per table entry, to hand it to HiGHS
_MOVE_SECONDS = 1e-4  # for one move of a repair, and
_MOVE_ENTRY_SECONDS = 3e-9  # per entry of the usage
DENSE_SECONDS = 3e-8  # per entry of the dense usage, to make it and find the binding times


def direct_seconds(reduced: Reduced) -> float:
    """Return about how long `solve_direct` takes, inf if the problem is too large for it."""
    if reduced.usage >= DENSE_USAGE:
        return math.inf
    ways = [math.inf]
    if reduced.elimination.complete:
        ways.append(ELIMINATION_SECONDS * reduced.elimination.work)
    if reduced.entries < program_tables(reduced.memory):
        ways.append(PROGRAM_SECONDS * reduced.entries)
    return max(min(ways), DENSE_SECONDS * reduced.usage)


def solve_direct(reduced: Reduced) -> bool:
    """Return whether the problem is solved; if not, what is left is too large for this method."""
    reduced.find_start()  # the time may end before an integer program does
    network, search, memory = reduced.network, reduced.search, reduced.memory
    elimination = reduced.elimination if elimination_in_time(reduced) else None
    if not _solved(network, search, elimination, memory):
        reduced.read_memory()
        return False
    return True


def elimination_in_time(reduced: Reduced) -> bool:
    """Return whether the elimination covers all nodes and ends before the deadline."""
    elimination = reduced.elimination
    seconds = ELIMINATION_SECONDS * elimination.work
    return elimination.complete and seconds < reduced.search.seconds


def _solved(
    network: Network,
    search: Search,
    elimination: Elimination | None,
    memory: MemoryProfile | None,
) -> bool:
    """Return whether the steps of the module docstring solve the reduced `network`."""
    nodes = network.open_nodes()
    costs = {i: network.cost[i] for i in nodes}
    constant = network.constant()
    chosen: dict[int, int] | None = None
    if elimination is not None:
        value, chosen = elimination.solve(costs, until=search.until)
        if value == math.inf:
            raise NoAssignment
        search.raise_bound(value + constant - 1e-13 * abs(value), "elimination")
    if memory is None or not memory.num_times:
        usage, slack = np.zeros((0, sum(map(len, costs.values())))), np.zeros(0)
        fits = True
    else:
        positions = np.array([chosen[i] for i in nodes], dtype=np.int64) if chosen else None
        fits = positions is None or bool(
            (memory.usage(memory.indicator(positions)) <= memory.allowed()).all()
        )
        if not fits or positions is None:
            usage, slack = binding_rows(memory)
            fits = not len(slack)
    if chosen is not None and fits:
        search.offer(network.expand(chosen), "elimination")
        search.lower_bound = search.objective
        search.report("elimination")
        return True
    if len(slack) and (_least_usage(usage, memory) > slack).any():  # type: ignore[arg-type]
        prove_infeasible(network, search, nodes, usage, slack)
        return True
    if elimination is not None and chosen is not None and elimination.work < PRICING_WORK:
        _price_memory(network, search, elimination, nodes, chosen, usage, slack)
        if search.closed:
            return True
    tables = network.num_entries()
    if tables > program_tables(memory) or not search.programs:
        return False
    if PROGRAM_SECONDS * tables > search.seconds:
        raise OutOfTime
    _integer_program(network, search)
    return True


def program_tables(memory: MemoryProfile | None) -> float:
    """Return the table entries up to which HiGHS comes before messages."""
    return FREE_PROGRAM_TABLES if memory is None else PROGRAM_TABLES


def _least_usage(usage: np.ndarray, memory: MemoryProfile) -> np.ndarray:
    if not len(memory.nodes):
        return np.zeros(len(usage))
    return np.asarray(np.minimum.reduceat(usage, memory.offset[:-1], axis=1).sum(1))


def _price_memory(
    network: Network,
    search: Search,
    elimination: Elimination,
    nodes: list[int],
    chosen: dict[int, int],
    usage: np.ndarray,
    slack: np.ndarray,
) -> None:
    """Steps 2 and 3 of the module docstring."""
    moves = LocalMoves(network, nodes, usage, slack)
    multipliers = raise_bound(network, search, elimination, moves, chosen)
    if search.closed or search.late:
        return
    fix_strategies(network, search, elimination, nodes, usage, slack, multipliers)


def raise_bound(
    network: Network,
    search: Search,
    elimination: Elimination,
    moves: LocalMoves,
    chosen: dict[int, int],
    max_steps: int = 60,
) -> np.ndarray:
    """Return multipliers [times] that nearly maximise L, offering repaired minimisers too."""
    nodes, usage, slack, offset = moves.nodes, moves.usage, moves.slack, moves.offset
    costs = np.concatenate([network.cost[i] for i in nodes])
    constant = network.constant()
    best, best_value = np.zeros(len(slack)), -math.inf
    rows: list[int] = []
    planes: list[tuple[float, np.ndarray]] = []
    unit = np.maximum(np.abs(slack), np.abs(usage).max(1))
    seen: set[bytes] = set()
    move_seconds = _MOVE_SECONDS + _MOVE_ENTRY_SECONDS * usage.size
    multipliers = np.zeros(len(slack))
    positions = np.array([chosen[i] for i in nodes], dtype=np.int64)
    step_limit = 0.0
    for step in range(max_steps):
        if step:
            priced = costs + multipliers @ usage
            value, chosen = elimination.solve(
                {i: priced[offset[p] : offset[p + 1]] for p, i in enumerate(nodes)},
                until=search.until,
            )
            positions = np.array([chosen[i] for i in nodes], dtype=np.int64)
            value += constant - float(multipliers @ slack)
            value -= 1e-13 * (abs(value) + float(multipliers @ np.abs(slack)))
            if value > best_value:
                best, best_value = multipliers, value
            search.raise_bound(value, "multipliers")
        excess = usage[:, offset[:-1] + positions].sum(1) - slack
        plain = moves.cost(positions)
        planes.append((plain + constant, excess))
        key = positions.tobytes()
        if key not in seen:
            seen.add(key)
            most = int(min(200.0, search.seconds / move_seconds))
            repaired = moves.improve(positions, most)
            if repaired is not None:
                search.offer(
                    network.expand(dict(zip(nodes, repaired.tolist(), strict=True))), "repair"
                )
        if search.closed or search.late:
            break
        rows += [t for t in violated_peaks(excess, 4) if t not in rows]
        if not step:
            step_limit = _first_price(planes[0], search, rows, unit)
        target, prices = _master(planes, rows, unit, step_limit, search)
        multipliers = np.zeros(len(slack))
        multipliers[rows] = prices
        if (prices >= 0.999 * step_limit / unit[rows]).any():
            step_limit *= 4
        elif target <= best_value + 1e-9 * abs(target) + 1e-12:
            break
    return best


def _first_price(
    plane: tuple[float, np.ndarray], search: Search, rows: list[int], unit: np.ndarray
) -> float:
    worst = max(float(plane[1][t] / unit[t]) for t in rows)
    rise = search.objective - plane[0] if math.isfinite(search.objective) else abs(plane[0])
    return 4 * max(rise, 1e-9 * abs(plane[0]), 1e-300) / max(worst, 1e-3)


def _master(
    planes: list[tuple[float, np.ndarray]],
    rows: list[int],
    unit: np.ndarray,
    step_limit: float,
    search: Search,
) -> tuple[float, np.ndarray]:
    """Return (value, prices [rows]) maximising the least plane over 0 <= prices <= step_limit /
    unit.
    """
    origin, level = planes[0][0], max(step_limit, 1e-300)
    height, prices = highest_point(
        np.array([(value - origin) / level for value, _ in planes]),
        np.array([slope[rows] / unit[rows] for _, slope in planes]),
        most=1.0,
        ceiling=(search.objective - origin) / level,
        until=search.until,
    )
    return origin + height * level, prices * level / unit[rows]


def fix_strategies(
    network: Network,
    search: Search,
    elimination: Elimination,
    nodes: list[int],
    usage: np.ndarray,
    slack: np.ndarray,
    multipliers: np.ndarray,
) -> None:
    """Drop from `network` the strategies that no choice better than the best can use."""
    cutoff = search.cutoff()
    if not math.isfinite(cutoff):
        return
    sizes = [len(network.cost[i]) for i in nodes]
    offset = np.concatenate([[0], np.cumsum(sizes)])
    priced = np.concatenate([network.cost[i] for i in nodes]) + multipliers @ usage
    costs = {i: priced[offset[p] : offset[p + 1]] for p, i in enumerate(nodes)}
    shift = network.constant() - float(multipliers @ slack)
    margin = 1e-12 * (
        abs(cutoff) + abs(shift) + float(np.abs(priced[np.isfinite(priced)]).max(initial=0))
    )
    try:
        marginals = elimination.min_marginals(costs, until=search.until)
        network.restrict({i: m + shift <= cutoff + margin for i, m in marginals.items()})
    except NoAssignment:
        search.lower_bound = search.objective
        search.report("fixing")


def _integer_program(network: Network, search: Search) -> None:
    """Step 4 of the module docstring: what is left of `network`, by HiGHS."""
    instance = search.instance
    nodes = network.open_nodes()
    memory = MemoryProfile(instance, network) if math.isfinite(instance.limit) else None
    if memory is None:
        usage, slack = np.zeros((0, sum(len(network.cost[i]) for i in nodes))), np.zeros(0)
    else:
        usage, slack = binding_rows(memory)
    if not nodes:
        if (slack < 0).any():
            if search.choice is None:
                prove_infeasible(network, search, nodes, usage, slack)
            else:
                search.raise_bound(search.objective, "reduction")
            return
        search.offer(network.expand({}), "reduction")
        search.raise_bound(min(search.objective, network.constant()), "reduction")
        search.lower_bound = search.objective
        return
    program = IntegerProgram.of_network(
        network,
        nodes,
        usage,
        slack,
        exact_memory=memory is None or memory.exact,
        cutoff=search.cutoff(),
        seed=search.seed,
        max_nodes=search.max_nodes,
    )
    outcome = program.solve(search.until_hung)
    if outcome.chosen is not None:
        search.offer(
            network.expand(dict(zip(nodes, outcome.chosen.tolist(), strict=True))),
            "integer program",
        )
    if outcome.finished:
        if search.choice is None:
            prove_infeasible(network, search, nodes, usage, slack)
        else:
            search.raise_bound(search.objective, "integer program")
    else:
        search.raise_bound(outcome.lower_bound, "integer program")
