"""CPU seconds of `ilp_sharding` beside pytoulbar2 and plain HiGHS on the problems of planning.

    python benchmarks/ilp_sharding_solvers.py [--plan gpt:tiny:h100:8 ...] [--largest 3]

Each `--plan MODEL:SIZE:CLUSTER` plans one step of the corpus and records every selection problem on
the way; of each shape of problem (nodes, edges, table entries) the one that took longest is kept,
and the `--largest` of them are given to the three solvers with warm loops, the rivals for
`--seconds` each. pytoulbar2 takes costs as decimals with nine digits after the point of the largest
and is left out where it is not installed (`pip install pytoulbar2`). HiGHS gets the textbook
program: a binary for every strategy, a variable for every table entry, whose sums over rows and
columns are those binaries.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import highspy
import numpy as np
import scipy.sparse

import alpa_meta as alpa
import ilp_sharding
from alpa_interchange import ShardingProblem
from alpa_meta.corpus import build
from cost_model import cluster

try:
    import pytoulbar2
except ImportError:
    pytoulbar2 = None

PLANS = ("gpt:tiny:h100:8", "unet:tiny:h100:8", "llama:tiny:h100:16")
DIGITS = 9


def recorded(plan: str) -> list[ShardingProblem]:
    """Return the problems that planning `plan` solves, longest first, one of each shape."""
    model_name, size, device = plan.split(":", 2)
    model = build(model_name, size)
    found: dict[tuple[int, ...], tuple[float, ShardingProblem]] = {}
    solve = ilp_sharding.solve

    def recording(problem: ShardingProblem, options: Any = None) -> Any:
        began = time.process_time()
        solution = solve(problem, options)
        seconds = time.process_time() - began
        shape = problem.num_nodes, len(problem.edges), problem.edge_cost.size
        if shape not in found or found[shape][0] < seconds:
            found[shape] = seconds, problem
        return solution

    ilp_sharding.solve = recording
    try:
        options = alpa.Options(cache=False, exact=model.exact)
        step = alpa.parallelize(model.train_step, cluster=cluster(device), options=options)
        step.plan_for(model.state, model.batch)
    finally:
        ilp_sharding.solve = solve
    return [problem for _, problem in sorted(found.values(), key=lambda entry: -entry[0])]


def tables(problem: ShardingProblem) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (first node, second node, table) of every edge."""
    count, start = problem.num_strategies.tolist(), 0
    for first, second in problem.edges.tolist():
        stop = start + count[first] * count[second]
        yield first, second, problem.edge_cost[start:stop].reshape(count[first], count[second])
        start = stop


def by_us(problem: ShardingProblem, seconds: float) -> tuple[float | None, bool]:
    """Return (objective, whether it is proved) of `ilp_sharding`, as the planner calls it."""
    solution = ilp_sharding.solve(problem, ilp_sharding.SolveOptions(rounds=60))
    return solution.objective, solution.status == "optimal"


def by_toulbar2(problem: ShardingProblem, seconds: float) -> tuple[float | None, bool]:
    """Return (objective, whether it is proved) of pytoulbar2; memory is not handed over."""
    finite = np.concatenate([problem.node_cost, problem.edge_cost])
    finite = finite[np.isfinite(finite)]
    digits = DIGITS - math.ceil(math.log10(max(float(np.abs(finite).max()), 1e-300)))
    top = float(np.abs(finite).max()) * (problem.num_nodes + len(problem.edges)) + 1.0
    network = pytoulbar2.CFN(top, resolution=max(digits, 0))
    bounds = np.concatenate([[0], np.cumsum(problem.num_strategies)])
    for i, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        network.AddVariable(f"x{i}", range(stop - start))
        costs = np.minimum(problem.node_cost[start:stop].astype(float), top)
        network.AddFunction([f"x{i}"], costs.tolist())
    for first, second, table in tables(problem):
        costs = np.minimum(table.astype(float), top).ravel()
        network.AddFunction([f"x{first}", f"x{second}"], costs.tolist())
    result = network.Solve(timeLimit=int(seconds))
    if not result:
        return None, False
    return ilp_sharding.check(
        problem, [int(value) for value in result[0]]
    ).cost, network.Limit is None


def by_highs(problem: ShardingProblem, seconds: float) -> tuple[float | None, bool]:
    """Return (objective, whether it is proved) of HiGHS on the textbook program, without memory."""
    bounds = np.concatenate([[0], np.cumsum(problem.num_strategies)])
    num = int(bounds[-1])
    cost = [problem.node_cost.astype(float)]
    rows: list[np.ndarray] = [np.repeat(np.arange(problem.num_nodes), problem.num_strategies)]
    columns: list[np.ndarray] = [np.arange(num)]
    values: list[np.ndarray] = [np.ones(num)]
    right = [np.ones(problem.num_nodes)]
    row, column = problem.num_nodes, num
    for first, second, table in tables(problem):
        entry = column + np.arange(table.size).reshape(table.shape)
        for axis, node in ((1, first), (0, second)):  # sums over the other end are its binaries
            size = table.shape[1 - axis]
            own = row + np.arange(size)
            rows += [np.broadcast_to(np.expand_dims(own, axis), table.shape).ravel(), own]
            columns += [entry.ravel(), bounds[node] + np.arange(size)]
            values += [np.ones(table.size), -np.ones(size)]
            right.append(np.zeros(size))
            row += size
        cost.append(table.ravel().astype(float))
        column += table.size
    costs, sides = np.concatenate(cost), np.concatenate(right)
    matrix = scipy.sparse.csc_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
        shape=(row, column),
    )
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = column, row
    model.col_cost_ = np.where(np.isfinite(costs), costs, 0.0)
    model.col_lower_ = np.zeros(column)
    model.col_upper_ = np.where(np.isfinite(costs), 1.0, 0.0)
    model.row_lower_ = model.row_upper_ = sides
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = matrix.indptr
    model.a_matrix_.index_ = matrix.indices
    model.a_matrix_.value_ = matrix.data
    integer, continuous = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    model.integrality_ = [integer] * num + [continuous] * (column - num)
    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("time_limit", seconds)
    highs.setOptionValue("threads", 1)
    highs.passModel(model)
    highs.run()
    proved = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    objective = highs.getInfo().objective_function_value
    return (objective, proved) if math.isfinite(objective) else (None, False)


def timed(
    run: Callable[[ShardingProblem, float], tuple[float | None, bool]],
    problem: ShardingProblem,
    seconds: float,
) -> str:
    """Return CPU seconds, objective and proof as a cell of the table."""
    began = time.process_time()
    objective, proved = run(problem, seconds)
    cell = f"{time.process_time() - began:.2f}"
    return cell if proved else f"{cell} ({'none' if objective is None else 'unproved'})"


def main() -> None:
    """Print one line of the table for every problem."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plan", nargs="*", default=PLANS)
    parser.add_argument("--largest", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    rivals = [by_highs] if pytoulbar2 is None else [by_toulbar2, by_highs]
    ilp_sharding.warm_up()
    print("| plan | nodes | edges | entries | ilp-sharding |", end="")
    print("".join(f" {rival.__name__.removeprefix('by_')} |" for rival in rivals))
    print("|---" * (5 + len(rivals)) + "|")
    for plan in arguments.plan:
        for problem in recorded(plan)[: arguments.largest]:
            cells = [timed(run, problem, arguments.seconds) for run in (by_us, *rivals)]
            sizes = (problem.num_nodes, len(problem.edges), problem.edge_cost.size)
            print(f"| {plan} | {' | '.join(map(str, [*sizes, *cells]))} |", flush=True)


if __name__ == "__main__":
    main()
