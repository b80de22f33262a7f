"""What remains after reductions as a mixed-integer program for HiGHS.

Variables: x_iv in {0, 1}, node i uses strategy v; y_e,kl >= 0, edge e uses the pair (k, l), only
for pairs that are allowed.

    minimise    sum c_iv x_iv + sum r_e,kl y_e,kl
    subject to  sum_v x_iv = 1                                   for every node i
                sum_l y_e,kl = x_ak,  sum_k y_e,kl = x_bl        for every edge e = (a, b)
                sum_iv u_t,iv x_iv <= slack_t                    for the times t found violated

-> IntegerProgram. Memory rows are added when a relaxation or an integer answer violates them
-> IntegerProgram.solve(). An integer answer that exceeds a row by less than the solver's tolerance
is cut off exactly by a cover row. Costs are shifted by the least entry of their table and scaled to
the range that matters, so the solver's absolute tolerances become relative ones.
-> smallest_peak() minimises the largest usage instead, over allowed pairs only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import highspy
import numpy as np
from attrs import frozen

from ilp_sharding.exact.highs_run import run_until
from ilp_sharding.problem.flat_graph import TableGraph
from ilp_sharding.problem.memory_rows import violated_peaks
from ilp_sharding.problem.reduction import Network

_PRESOLVE_COLUMNS = 5000
_RELATIVE_TOLERANCE = 1e-7  # HiGHS bounds are trusted to this part of the cost range


@frozen(kw_only=True, eq=False)
class Outcome:
    """What a mixed-integer solve found: positions per open node (or None), bound, proof.

    `lower_bound` holds for every choice, or for every choice better than the cutoff if none was
    found; `finished` means the tree was exhausted.
    """

    chosen: np.ndarray | None
    lower_bound: float
    finished: bool


class IntegerProgram:
    """The program above: node costs, pairs (a, b, table), usage [times, strategies] and slack
    [times].
    """

    def __init__(
        self,
        costs: list[np.ndarray],
        pairs: list[tuple[int, int, np.ndarray]],
        usage: np.ndarray,
        slack: np.ndarray,
        *,
        exact_memory: bool,
        cutoff: float = math.inf,
        constant: float = 0.0,
        seed: int = 0,
        max_nodes: int | None = None,
    ) -> None:
        sizes = np.array([len(cost) for cost in costs], dtype=np.int64)
        self.offset = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.usage, self.slack, self.exact_memory = usage, slack, exact_memory
        self.present: set[int] = set()
        least_cost = [float(cost.min()) for cost in costs]
        least_pair = [float(pair[2].min()) for pair in pairs]
        self.shift = constant + math.fsum(least_cost) + math.fsum(least_pair)
        costs = [cost - least for cost, least in zip(costs, least_cost, strict=True)]
        pairs = [
            (a, b, table - least) for (a, b, table), least in zip(pairs, least_pair, strict=True)
        ]
        finite = [v[v < np.inf] for v in costs] + [p[2][p[2] < np.inf] for p in pairs]
        largest = max((float(v.max()) for v in finite if v.size), default=0.0)
        room = cutoff - self.shift if math.isfinite(cutoff) else largest
        self.room = max(min(room, largest * (len(finite) + 1)), 0.0)
        self.scale = max(min(self.room, largest), 1e-300) / 1e4
        self.highs = _quiet(seed, max_nodes)
        self._pass_model(costs, pairs)

    @classmethod
    def of_network(
        cls,
        network: Network,
        nodes: Sequence[int],
        usage: np.ndarray,
        slack: np.ndarray,
        *,
        exact_memory: bool,
        cutoff: float,
        seed: int,
        max_nodes: int | None = None,
    ) -> IntegerProgram:
        """Return the program over the open `nodes` of `network`."""
        position = {node: p for p, node in enumerate(nodes)}
        pairs = [
            (position[node], position[other], table)
            for node in nodes
            for other, table in network.tables[node].items()
            if node < other and other in position
        ]
        return cls(
            [network.cost[i] for i in nodes],
            pairs,
            usage,
            slack,
            exact_memory=exact_memory,
            cutoff=cutoff,
            constant=network.constant(),
            seed=seed,
            max_nodes=max_nodes,
        )

    @classmethod
    def of_graph(
        cls, graph: TableGraph, *, cutoff: float, seed: int, max_nodes: int | None = None
    ) -> IntegerProgram:
        """Return the program over a table graph of moderate size."""
        tables, rows = graph.tables, graph.rows
        offset, bounds = tables.offset.tolist(), tables.entry_offset.tolist()
        sizes = np.diff(tables.offset).tolist()
        pairs = [
            (a, b, tables.entry[bounds[e] : bounds[e + 1]].reshape(sizes[a], sizes[b]))
            for e, (a, b) in enumerate(
                zip(tables.first.tolist(), tables.second.tolist(), strict=True)
            )
        ]
        usage = np.zeros((len(rows.slack) + 1, graph.num_strategies))
        owner = np.repeat(np.arange(graph.num_strategies), np.diff(rows.start))
        np.add.at(usage, (rows.time, owner), rows.change)
        return cls(
            [tables.cost[a:b] for a, b in zip(offset, offset[1:], strict=False)],
            pairs,
            np.cumsum(usage, axis=0)[:-1],
            rows.slack,
            exact_memory=bool(np.array_equal(rows.change, np.rint(rows.change))),
            cutoff=cutoff,
            constant=graph.constant,
            seed=seed,
            max_nodes=max_nodes,
        )

    def solve(
        self,
        deadline: float,
        on_bound: Callable[[float], None] = lambda bound: None,
        on_choice: Callable[[np.ndarray, float], None] = lambda chosen, cost: None,
    ) -> Outcome:
        """Return the best choice under all memory rows, with its bound, before `deadline`.

        `on_bound` and `on_choice` (positions, cost) hear of progress on the way.
        """
        highs = self.highs
        num = int(self.offset[-1])
        bound = -math.inf
        while True:
            if not run_until(highs, deadline):
                return Outcome(chosen=None, lower_bound=bound, finished=False)
            status = highs.getModelStatus()
            if status == highspy.HighsModelStatus.kInfeasible:
                return Outcome(chosen=None, lower_bound=math.inf, finished=True)
            if status != highspy.HighsModelStatus.kOptimal:
                return Outcome(chosen=None, lower_bound=bound, finished=False)
            bound = max(bound, self._value(highs.getInfo().objective_function_value))
            on_bound(bound)
            weight = np.asarray(highs.getSolution().col_value)[:num]
            if not self._add_violated(weight, tolerance=1e-6):
                break
        highs.changeColsIntegrality(
            num, np.arange(num, dtype=np.int32), np.full(num, highspy.HighsVarType.kInteger)
        )
        self._listen(on_bound)
        while True:
            # With what the last run left behind HiGHS 1.15 can crash in its tree: each time on a
            # planning problem of LLaMA with 11,301 columns.
            highs.clearSolver()
            finished = run_until(highs, deadline)
            status = highs.getModelStatus()
            if status == highspy.HighsModelStatus.kInfeasible:
                return Outcome(chosen=None, lower_bound=math.inf, finished=True)
            info = highs.getInfo()
            if math.isfinite(info.mip_dual_bound):
                bound = max(bound, self._value(info.mip_dual_bound))
            if info.primal_solution_status != 2:
                return Outcome(chosen=None, lower_bound=bound, finished=False)
            weight = np.asarray(highs.getSolution().col_value)[:num]
            chosen = np.array(
                [
                    int(np.argmax(weight[a:b]))
                    for a, b in zip(self.offset, self.offset[1:], strict=False)
                ],
                dtype=np.int64,
            )
            exact = np.zeros(num)
            exact[self.offset[:-1] + chosen] = 1.0
            if not self._add_violated(exact, tolerance=0.0):
                on_choice(chosen, info.objective_function_value * self.scale + self.shift)
                done = finished and status == highspy.HighsModelStatus.kOptimal
                return Outcome(chosen=chosen, lower_bound=bound, finished=done)
            if not finished:
                return Outcome(chosen=None, lower_bound=bound, finished=False)

    def _listen(self, on_bound: Callable[[float], None]) -> None:
        """Report the tree's bound while HiGHS runs."""

        def heard(event: highspy.highs.HighsCallbackEvent) -> None:
            bound = event.data_out.mip_dual_bound
            if math.isfinite(bound):
                on_bound(self._value(bound))

        self.highs.cbMipInterrupt.subscribe(heard)

    def _value(self, objective: float) -> float:
        value = objective * self.scale + self.shift
        return value - _RELATIVE_TOLERANCE * self.scale * 1e4

    def _add_violated(self, weight: np.ndarray, tolerance: float) -> bool:
        """Add rows that `weight` violates; return whether any was added."""
        if not len(self.slack):
            return False
        excess = self.usage @ weight - self.slack
        allowed = tolerance * np.maximum(np.abs(self.slack), 1e-300)
        if tolerance == 0.0 and not self.exact_memory:
            allowed = allowed + 1e-12 * np.abs(self.usage).sum(1)
        added = False
        for t in violated_peaks(excess - allowed, 20):
            row = self.usage[t]
            if t not in self.present:
                self.present.add(t)
                used = np.flatnonzero(row)
                size = float(np.abs(row).max())
                self.highs.addRow(
                    -highspy.kHighsInf,
                    self.slack[t] / size,
                    len(used),
                    used.astype(np.int32),
                    row[used] / size,
                )
                added = True
            elif tolerance == 0.0:
                cover = np.flatnonzero((weight > 0.5) & (row > 0))
                self.highs.addRow(
                    -highspy.kHighsInf,
                    len(cover) - 1.0,
                    len(cover),
                    cover.astype(np.int32),
                    np.ones(len(cover)),
                )
                added = True
        return added

    def _pass_model(
        self, costs: list[np.ndarray], pairs: list[tuple[int, int, np.ndarray]]
    ) -> None:
        num = int(self.offset[-1])
        cost = [np.concatenate(costs) if costs else np.zeros(0)]
        upper = [np.where(cost[0] > self.room, 0.0, 1.0)]
        num_nodes = len(costs)
        rows = [np.repeat(np.arange(num_nodes), np.diff(self.offset))]
        columns, values = [np.arange(num)], [np.ones(num)]
        num_rows, num_columns = num_nodes, num
        for a, b, table in pairs:
            k, l = np.nonzero(table <= self.room * (1 + 1e-9))
            column = num_columns + np.arange(len(k))
            cost.append(table[k, l])
            upper.append(np.full(len(k), np.inf))
            na, nb = table.shape
            rows += [num_rows + k, num_rows + na + l]
            columns += [column, column]
            values += [np.ones(len(k)), np.ones(len(k))]
            rows.append(num_rows + np.arange(na + nb))
            columns += [self.offset[a] + np.arange(na), self.offset[b] + np.arange(nb)]
            values.append(-np.ones(na + nb))
            num_rows += na + nb
            num_columns += len(k)
        side = np.zeros(num_rows)
        side[:num_nodes] = 1.0
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = num_columns, num_rows
        objective = np.concatenate(cost)
        lp.col_cost_ = np.where(np.isfinite(objective), objective, 0.0) / self.scale
        lp.col_lower_ = np.zeros(num_columns)
        lp.col_upper_ = np.concatenate(upper)
        lp.row_lower_ = lp.row_upper_ = side
        start, index, value = _compressed_rows(
            np.concatenate(rows), np.concatenate(columns), np.concatenate(values), num_rows
        )
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = start, index, value
        if num_columns < _PRESOLVE_COLUMNS:
            # the problem is reduced already, and HiGHS 1.15 can loop in presolve of tiny programs
            self.highs.setOptionValue("presolve", "off")
        self.highs.passModel(lp)


def smallest_peak(
    network: Network,
    nodes: Sequence[int],
    usage: np.ndarray,
    slack: np.ndarray,
    deadline: float,
    max_nodes: int | None = None,
) -> tuple[np.ndarray | None, float, bool]:
    """Return (positions per open node, excess, proved): the choice whose worst `usage - slack` is
    least.

    `excess` is the proven least worst excess over the limit if proved, else a lower bound on it.
    """
    if not nodes:
        return np.zeros(0, dtype=np.int64), float((-slack).max(initial=-math.inf)), True
    sizes = np.array([len(network.cost[i]) for i in nodes], dtype=np.int64)
    offset = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    num = int(offset[-1])
    position = {node: p for p, node in enumerate(nodes)}
    scale = max(float(np.abs(usage).max()), float(np.abs(slack).max()), 1e-300)
    rows = [np.repeat(np.arange(len(nodes)), sizes)]
    columns, values = [np.arange(num)], [np.ones(num)]
    lower, upper = [np.ones(len(nodes))], [np.ones(len(nodes))]
    num_rows = len(nodes)
    for node in nodes:
        for other, table in network.tables[node].items():
            forbidden = table == np.inf
            if other not in position or not forbidden.any():
                continue
            # x_node,k <= sum of the strategies of the other end that k allows
            choosy = np.flatnonzero(forbidden.any(1))
            row, allowed = np.nonzero(~forbidden[choosy])
            rows.append(num_rows + np.concatenate([np.arange(len(choosy)), row]))
            columns += [offset[position[node]] + choosy, offset[position[other]] + allowed]
            values += [np.ones(len(choosy)), -np.ones(len(allowed))]
            lower.append(np.full(len(choosy), -np.inf))
            upper.append(np.zeros(len(choosy)))
            num_rows += len(choosy)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = num + 1, num_rows
    lp.col_cost_ = np.concatenate([np.zeros(num), [1.0]])
    lp.col_lower_ = np.concatenate([np.zeros(num), [-np.inf]])
    lp.col_upper_ = np.concatenate([np.ones(num), [np.inf]])
    lp.row_lower_, lp.row_upper_ = np.concatenate(lower), np.concatenate(upper)
    start, index, value = _compressed_rows(
        np.concatenate(rows), np.concatenate(columns), np.concatenate(values), num_rows
    )
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = start, index, value
    lp.integrality_ = [highspy.HighsVarType.kInteger] * num + [highspy.HighsVarType.kContinuous]
    highs = _quiet(0, max_nodes)
    if num < _PRESOLVE_COLUMNS:
        highs.setOptionValue("presolve", "off")
    highs.passModel(lp)
    for t in range(len(slack)):
        used = np.flatnonzero(usage[t])
        highs.addRow(
            -highspy.kHighsInf,
            slack[t] / scale,
            len(used) + 1,
            np.concatenate([used, [num]]).astype(np.int32),
            np.concatenate([usage[t][used] / scale, [-1.0]]),
        )
    finished = run_until(highs, deadline)
    info = highs.getInfo()
    if info.primal_solution_status != 2:
        bound = info.mip_dual_bound * scale if math.isfinite(info.mip_dual_bound) else -math.inf
        return None, bound, False
    weight = np.asarray(highs.getSolution().col_value)[:num]
    chosen = np.array(
        [int(np.argmax(weight[a:b])) for a, b in zip(offset, offset[1:], strict=False)],
        dtype=np.int64,
    )
    exact = np.zeros(num)
    exact[offset[:-1] + chosen] = 1.0
    excess = float((usage @ exact - slack).max())
    if finished and highs.getModelStatus() == highspy.HighsModelStatus.kOptimal:
        return chosen, excess, True
    return chosen, (info.mip_dual_bound - 1e-7) * scale, False


def _quiet(seed: int, max_nodes: int | None = None) -> highspy.Highs:
    """Return HiGHS that prints nothing; its tree ends at `max_nodes`, if given."""
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in {
        "output_flag": False,
        "threads": 1,
        "random_seed": seed % 2**31,
        "mip_rel_gap": 0.0,
        "mip_feasibility_tolerance": 1e-7,
        "mip_abs_gap": 1e-4,  # of a cost range of 1e4
    }.items():
        highs.setOptionValue(name, value)
    if max_nodes is not None:
        highs.setOptionValue("mip_max_nodes", max_nodes)
    return highs


def _compressed_rows(
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray, num_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.argsort(rows, kind="stable")
    start = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))])
    return start.astype(np.int32), columns[order].astype(np.int32), values[order]
