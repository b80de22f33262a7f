"""The selection problem as a cvxpy model, for any solver cvxpy knows (`ilp-sharding[cvxpy]`).

Variables: x[i] [strategies of i], one strategy per node; y[e] [strategies of a, strategies of b],
one pair per edge.

    minimise    sum_i c_i . x_i + sum_e <r_e, y_e>
    subject to  sum x_i = 1;  row sums of y_e = x_a;  column sums of y_e = x_b;
                sum_{i live at t} m_i . x_i <= limit for every time t at which something starts;
                x_iv = 0, y_e,kl = 0 where the cost is infinite

Meant to be read and tried, not for speed: `ilp_sharding.solve` is the fast path and agrees with it.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from alpa_interchange.selection import ShardingProblem, ShardingSolution
from ilp_sharding.evaluation import check

try:
    cvxpy: Any = importlib.import_module("cvxpy")
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "ilp_sharding.cvxpy_model needs cvxpy: pip install 'ilp-sharding[cvxpy]'"
    ) from error


def cvxpy_problem(problem: ShardingProblem) -> tuple[Any, list[Any]]:
    """Return (the cvxpy minimisation, the variables x per node)."""
    sizes = problem.num_strategies.tolist()
    start = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    x = [cvxpy.Variable(size, boolean=True, name=f"x{i}") for i, size in enumerate(sizes)]
    terms: list[Any] = []
    constraints: list[Any] = [cvxpy.sum(choice) == 1 for choice in x]
    for i, choice in enumerate(x):
        cost, allowed = _finite(problem.node_cost[start[i] : start[i + 1]])
        terms.append(cost @ choice)
        if not allowed.all():
            constraints.append(choice[~allowed] == 0)
    entry = 0
    for a, b in problem.edges.reshape(-1, 2).tolist():
        table = problem.edge_cost[entry : entry + sizes[a] * sizes[b]].reshape(sizes[a], sizes[b])
        entry += sizes[a] * sizes[b]
        if a == b:
            cost, allowed = _finite(table.diagonal())
            terms.append(cost @ x[a])
            constraints += [x[a][~allowed] == 0] if not allowed.all() else []
            continue
        cost, allowed = _finite(table)
        y = cvxpy.Variable((sizes[a], sizes[b]), nonneg=True)
        terms.append(cvxpy.sum(cvxpy.multiply(cost, y)))
        constraints += [cvxpy.sum(y, axis=1) == x[a], cvxpy.sum(y, axis=0) == x[b]]
        if not allowed.all():
            constraints.append(y[~allowed] == 0)
    if problem.memory_limit is not None:
        live = problem.live.reshape(-1, 2)
        holding = live[:, 0] < live[:, 1]
        for now in np.unique(live[holding, 0]).tolist():
            users = np.flatnonzero(holding & (live[:, 0] <= now) & (now < live[:, 1])).tolist()
            usage = sum(
                problem.node_memory[start[i] : start[i + 1]].astype(float) @ x[i] for i in users
            )
            constraints.append(usage <= problem.memory_limit)
    return cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(cvxpy.hstack(terms))), constraints), x


def solve_with_cvxpy(problem: ShardingProblem, **options: Any) -> ShardingSolution:
    """Return the answer of a cvxpy solver (HiGHS unless `solver=` says otherwise) to `problem`.

    `options` go to `cvxpy.Problem.solve`. The bound is the objective when the solver proves it.
    """
    began = time.perf_counter()
    model, x = cvxpy_problem(problem)
    options.setdefault("solver", "HIGHS")
    model.solve(**options)
    seconds = time.perf_counter() - began
    solver = f"cvxpy {options['solver']}"
    if model.status in ("infeasible", "infeasible_inaccurate"):
        return ShardingSolution(
            choice=None,
            objective=None,
            lower_bound=None,
            status="infeasible",
            seconds=seconds,
            solver=solver,
        )
    if x and x[0].value is None:
        return ShardingSolution(
            choice=None,
            objective=None,
            lower_bound=None,
            status="timed_out",
            seconds=seconds,
            solver=solver,
        )
    choice = tuple(int(np.argmax(choice.value)) for choice in x)
    objective = float(check(problem, choice).cost)
    proved = model.status == "optimal"
    return ShardingSolution(
        choice=choice,
        objective=objective,
        lower_bound=objective if proved else None,
        status="optimal" if proved else "feasible",
        seconds=seconds,
        solver=solver,
    )


def _finite(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (costs with 0 where infinite, mask of the finite ones)."""
    allowed = cost < np.inf
    return np.where(allowed, cost, 0).astype(float), allowed
