"""A bound of interleaved pipelines by a program that keeps every run of the schedule, for HiGHS.

Of p meshes with v chunks each, stage s on mesh s mod p; the microbatches run in the schedule's
order. Variables: y_scr >= 0, how many layers of class c run on stage s as row r, in any mixture of
rows; F_s and B_s, the seconds of stage s forward and back; e_k, when run k ends; the step's T.

    minimise    T
    subject to  e_k >= e_i + (F or B of k)      for i before k on its mesh
                e_k >= e_i + c + (F or B of k)  for i that it reads from, c seconds to cross
                F_s >= sum f_c y_scr,  B_s >= sum b_c y_scr,  F_s + B_s >= sum t_cr y_scr
                T >= e_k + sum over the stages s of a mesh of u_cr y_scr        for its last run k
                sum over the stages s of a mesh of (state_cr + k_s act_cr) y_scr <= M
                sum_sr y_scr = layers of class c,  sum_cr y_scr >= 1

with the least seconds f_c forward, b_c back, t_cr both, u_cr per step. The layers of a mesh, or of
each stage, may be asked to be a whole number. Layers are in no order, but where a single layer has
the first class it is on stage 0, and that of the last class on the last. -> least_step()
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import highspy
import numpy as np
from attrs import frozen

from stage_dp.interleaved_order import InterleavedOrder
from stage_dp.joint_sweep import NEVER
from stage_dp.menu_table import Array, Index

TRUSTED = 1e-6  # of T: HiGHS's tolerances are a tenth of it
# Forwards in all up to which each stage has a whole number of layers, not only each mesh. Of twice
# as many, trees took 3 to 10 times as long for bounds of GPT-1.3B at most 1 % higher; with
# 0 its gap on 16 H100 is 7.3 % instead of 5.1 %.
MAX_BY_STAGE = 24
MAX_NODES = 200  # of the tree; what is left open then bounds the step


@frozen(kw_only=True, eq=False)
class Layers:
    """Classes of layers with the rows of one mesh: [classes, rows], or [classes].

    `seconds` t and `step` u (t of NEVER: no row), `state` and `activation` bytes, `forward` f and
    `backward` b, `number` of layers. `first` and `last`: classes of the first and last layer.
    """

    seconds: Array
    step: Array
    state: Array
    activation: Array
    forward: Array
    backward: Array
    number: Array
    memory: float
    first: int
    last: int


def least_step(
    layers: Layers,
    schedule: InterleavedOrder,
    crossing: Sequence[float],
    whole: bool,
    count: int | None = None,
) -> float:
    """Return a bound on the step seconds; inf where nothing fits. `crossing` [meshes]: seconds one
    way from each mesh to the next at least, from the last to the first. `whole`: meshes or stages
    have whole numbers of layers. With a `count` of microbatches, `schedule` only says how many of
    them chunks hold, and in place of e_k each mesh has its work and what it waits for each chunk.
    """
    return _Program(layers, schedule, crossing, whole, count).solve()


class _Program:
    """Columns: y by stage and pair (class, row) that there is, F and B by stage, T, e by run."""

    def __init__(
        self,
        layers: Layers,
        schedule: InterleavedOrder,
        crossing: Sequence[float],
        whole: bool,
        count: int | None,
    ) -> None:
        self.layers, self.schedule, self.whole = layers, schedule, whole
        self.count = count
        self.pairs = np.argwhere(layers.seconds < NEVER)
        own = tuple(self.pairs.T)
        least = np.where(layers.seconds < NEVER, layers.seconds, 0.0)
        self.scale = max(float(least.max()) * float(layers.number.sum()), 1e-300)
        self.seconds, self.step = layers.seconds[own] / self.scale, layers.step[own] / self.scale
        self.state, self.activation = layers.state[own], layers.activation[own]
        self.forward = layers.forward[own[0]] / self.scale
        self.backward = layers.backward[own[0]] / self.scale
        self.crossing = [c / self.scale for c in crossing]
        num, width = schedule.num_stages, len(self.pairs)
        self.y: Index = np.arange(num * width).reshape(num, width)
        self.run_columns = num * width + np.arange(2 * num).reshape(2, num)
        self.end = num * (width + 2)
        self.num_columns = self.end + 1
        self.rows: list[tuple[list[int], list[float], float, float]] = []

    def solve(self) -> float:
        """Return the bound."""
        if self.count is None:
            self._add_runs()
        else:
            self._add_waits(self.count)
        self._add_stages()
        program = highspy.Highs()  # type: ignore[no-untyped-call]
        program.setOptionValue("output_flag", False)
        program.setOptionValue("threads", 1)
        program.setOptionValue("mip_max_nodes", MAX_NODES)
        program.setOptionValue("mip_heuristic_effort", 0.0)
        program.passModel(self._model())
        program.run()
        status, info = program.getModelStatus(), program.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return math.inf
        if self.whole:
            least = info.mip_dual_bound
        elif status == highspy.HighsModelStatus.kOptimal:
            least = info.objective_function_value
        else:
            return 0.0
        return max(0.0, least * (1 - TRUSTED) - TRUSTED) * self.scale if least < 1e20 else 0.0

    def _add(self, terms: list[tuple[int, float]], low: float, high: float = math.inf) -> None:
        self.rows.append(([c for c, _ in terms], [x for _, x in terms], low, high))

    def _add_runs(self) -> None:
        """Add the ends of all runs and of the step."""
        schedule = self.schedule
        num, last = schedule.num_meshes, schedule.num_stages - 1
        count = schedule.num_microbatches
        # [forward or backward, stage, microbatch]
        ends = self.num_columns + np.arange(2 * (last + 1) * count).reshape(2, last + 1, count)
        self.num_columns += ends.size
        of_run = self.run_columns.tolist()
        for mesh in range(num):
            runs = np.empty((2 * len(schedule.chunk), 3), dtype=np.int64)
            for back, (chunk, at) in enumerate(
                zip((schedule.chunk, schedule.back), schedule.places(mesh), strict=True)
            ):
                runs[at, 0], runs[at, 1] = back, chunk * num + mesh
                runs[at, 2] = schedule.microbatch
            before: int | None = None
            for (back, stage, microbatch), end in zip(
                runs.tolist(), ends[tuple(runs.T)].tolist(), strict=True
            ):
                run = [(end, 1.0), (of_run[back][stage], -1.0)]
                self._add([*run, *([] if before is None else [(before, -1.0)])], 0.0)
                source = stage + (1 if back else -1)
                if 0 <= source <= last:
                    link = min(source, stage) % num
                    value = int(ends[back, source, microbatch])
                    self._add([*run, (value, -1.0)], self.crossing[link])
                elif back:
                    self._add([*run, (int(ends[0, stage, microbatch]), -1.0)], 0.0)
                before = end
            if before is not None:
                own = self.y[mesh::num]
                update = [(int(c), -x) for row in own for c, x in zip(row, self.step, strict=True)]
                self._add([(self.end, 1.0), (before, -1.0), *update], 0.0)

    def _add_waits(self, count: int) -> None:
        """Add what each mesh works, and waits before each of its chunks, there and back: the first
        two inequalities of interleaved_bound.py with the crossings d."""
        num, meshes = self.schedule.num_stages, self.schedule.num_meshes
        ran = min(meshes, count)  # forwards of each chunk before that a mesh may have run
        for stage in range(num):
            own = range(stage % meshes, num, meshes)
            before = range(stage % meshes, stage, meshes)
            way = sum(self.crossing[s % meshes] for s in range(stage))
            update = [(int(c), -x) for s in own for c, x in zip(self.y[s], self.step, strict=True)]
            for ways in (1, 2):
                wait = np.zeros((2, num))
                wait[:, list(own)] -= count
                wait[:ways, :stage] -= 1
                wait[:ways, list(before)] += ran
                terms = zip(self.run_columns.ravel().tolist(), wait.ravel().tolist(), strict=True)
                self._add([(self.end, 1.0), *terms, *(update if ways == 1 else [])], ways * way)

    def _add_stages(self) -> None:
        """Add the layers of stages, their seconds and their bytes."""
        layers, schedule = self.layers, self.schedule
        for stage, row in enumerate(self.y):
            forward, backward = (int(c) for c in self.run_columns[:, stage])
            for columns, least in (
                ([forward], self.forward),
                ([backward], self.backward),
                ([forward, backward], self.seconds),
            ):
                own = [(int(c), -x) for c, x in zip(row, least, strict=True)]
                self._add([*((c, 1.0) for c in columns), *own], 0.0)
        for number, count in enumerate(layers.number):
            own = [(int(c), 1.0) for c in self.y[:, self.pairs[:, 0] == number].ravel()]
            self._add(own, float(count), float(count))
        for mesh in range(schedule.num_meshes):
            size = [
                (int(c), float(x) / layers.memory)
                for stage in range(mesh, schedule.num_stages, schedule.num_meshes)
                for c, x in zip(
                    self.y[stage],
                    self.state + schedule.in_flight[stage] * self.activation,
                    strict=True,
                )
            ]
            if math.isfinite(layers.memory):
                self._add(size, -math.inf, 1.0)
        for row in self.y:
            self._add([(int(c), 1.0) for c in row], 1.0)
        for part in self._wholes():
            self._add([*((int(c), 1.0) for c in part), (self.num_columns, -1.0)], 0.0, 0.0)
            self.num_columns += 1

    def _wholes(self) -> list[Index]:
        """Return the columns of each part that has a whole number of layers."""
        if not self.whole:
            return []
        schedule = self.schedule
        if schedule.num_stages * schedule.num_microbatches <= MAX_BY_STAGE:
            return list(self.y)
        return [self.y[mesh :: schedule.num_meshes].ravel() for mesh in range(schedule.num_meshes)]

    def _model(self) -> highspy.HighsLp:
        layers, num = self.layers, self.schedule.num_stages
        low, high = np.zeros(self.num_columns), np.full(self.num_columns, np.inf)
        for number, there in ((layers.first, 0), (layers.last, num - 1)):
            if layers.number[number] == 1:
                high[np.delete(self.y[:, self.pairs[:, 0] == number], there, axis=0)] = 0.0
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.num_columns, len(self.rows)
        cost = np.zeros(self.num_columns)
        cost[self.end] = 1.0
        if self.whole:
            integers = len(self._wholes())
            continuous, integer = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
            model.integrality_ = [continuous] * (self.num_columns - integers) + [integer] * integers
        model.col_cost_, model.col_lower_, model.col_upper_ = cost, low, high
        model.row_lower_ = np.array([row[2] for row in self.rows])
        model.row_upper_ = np.array([row[3] for row in self.rows])
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *(len(row[0]) for row in self.rows)])
        model.a_matrix_.index_ = np.array([c for row in self.rows for c in row[0]])
        model.a_matrix_.value_ = np.array([x for row in self.rows for x in row[1]])
        return model
