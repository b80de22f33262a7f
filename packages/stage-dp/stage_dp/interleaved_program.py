"""A bound of interleaved pipelines by a program that keeps every run of the schedule, for HiGHS.

Of p meshes with v chunks each, stage s on mesh s mod p; the microbatches run in the schedule's
order. Variables: y_scr >= 0, how many layers of class c run on stage s as row r, in any mixture of
rows; F_s and B_s, the seconds of stage s forward and back; e_k, when run k ends; the step's T.

    minimise    T
    subject to  e_k >= e_i + (F or B of k)      for i before k on its mesh
                e_k >= e_i + c + (F or B of k)  for i that it reads from, c seconds to cross
                F_s >= sum f_c y_scr,  B_s >= sum b_c y_scr,  F_s + B_s >= sum t_cr y_scr
                F_s + B_s >= sum t_cr y_scr + m_c (sum_r y_scr - 1) - l_c
                T >= e_k + sum over the stages s of a mesh of u_cr y_scr        for its last run k
                sum over the stages s of a mesh of (state_cr + k_s act_cr) y_scr <= M
                sum_sr y_scr = layers of class c,  sum_cr y_scr >= 1

with the least seconds f_c forward, b_c back, t_cr both, u_cr per step, and where all layers of a
class are in a row the m_c that each takes more after another, and l_c that a row of them takes less
(-> LayerFloor). The layers of a mesh, or of each stage, may be asked to be a whole number. Layers
are in no order, but where a single layer has the first class it is on stage 0, and that of the last
class on the last.                                                             -> least_step()

Rows that are all sums of one of some parts (t, u, state) and one of others (t', act) have a y for
each part in place of each sum: a mixture of sums is the sum of two mixtures of as many layers. Rows
of floors are such sums: of 54 there are 18 and 3 parts.                          -> _parts()
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import highspy
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from stage_dp.interleaved_order import InterleavedOrder
from stage_dp.joint_sweep import NEVER
from stage_dp.menu_table import Array, Index

SAME = 1e-12  # of the seconds of rows: what rounding makes of sums
TRUSTED = 1e-6  # of T: HiGHS's tolerances are a tenth of it
# Forwards in all up to which each stage has a whole number of layers, not only each mesh. With 64
# joint searches of LLaMA-8B on 64 H100 take 6.5 instead of 5.3 CPU s for a bound 0.2 % higher; with
# 0 the gap of GPT-1.3B on 16 H100 is 7.3 % instead of 5.1 %.
MAX_BY_STAGE = 32
# HiGHS's number of the primal simplex: the 66 programs of GPT-175B without whole layers take 2.6
# CPU s by it, 3.5 by the dual one.
PRIMAL = 4
# Of a tree without heuristics, and where that does not end of one with them; what is left open then
# bounds the step. A few trees of 32 meshes took 287 nodes without and one node with them.
MAX_NODES = 50, 200
MIP_GAP = 1e-6  # of T; as fast as HiGHS's own 1e-4, and bounds are that much tighter
# Of HiGHS, which run whatever effort they are given: a bound needs no solution, and without them
# the 22 programs with whole layers of GPT-175B on 1,024 A100 take 8.1 instead of 18.5 CPU s; with
# parts in place of their sums 4.3.
HEURISTICS = "run_rins", "run_rens", "run_root_reduced_cost", "run_feasibility_jump"


@frozen(kw_only=True, eq=False)
class Layers:
    """Classes of layers with the rows of one mesh: [classes, rows], or [classes].

    `seconds` t and `step` u (t of NEVER: no row), `state` and `activation` bytes, `forward` f and
    `backward` b, `number` of layers. `first` and `last`: classes of the first and last layer.
    `follow`: the seconds per microbatch that every layer of a stage after the first takes more, and
    those by which the stage takes less, of classes whose layers are all in a row.
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
    follow: Array  # [2, classes]


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


@frozen(eq=False)
class _Parts:
    """What y stands for: [parts], of class `number`. Those that do not `count` as layers go with
    those of their class that do."""

    number: Index
    counts: NDArray[np.bool_]
    seconds: Array
    step: Array
    state: Array
    activation: Array


def _parts(layers: Layers) -> _Parts:
    """Return the rows of all classes, or the parts that they are sums of."""
    found = []
    for number in range(len(layers.number)):
        there = np.flatnonzero(layers.seconds[number] < NEVER)
        columns = (layers.seconds, layers.step, layers.state, layers.activation)
        own = np.stack([column[number, there] for column in columns])  # [columns, rows]
        kept, extra = np.unique(own[3], return_inverse=True)
        base, first = np.unique(own[1:3], axis=1, return_inverse=True)
        seconds = np.full((base.shape[1], len(kept)), np.inf)
        seconds[first.ravel(), extra.ravel()] = own[0]
        others = np.zeros((4, 0))
        if 1 < len(kept) < seconds.size == len(there) and np.isfinite(seconds).all():
            more = seconds - seconds[:, :1]
            if np.abs(more - more[0]).max() <= SAME * np.abs(seconds).max():
                own = np.stack([seconds[:, 0], base[0], base[1], np.zeros(len(seconds))])
                others = np.zeros((4, len(kept)))
                # The least of what rounding made different: the bound is none too high.
                others[0], others[3] = more.min(axis=0), kept
        for counts, part in ((True, own), (False, others)):
            same = np.full((2, part.shape[1]), [[number], [counts]])
            found.append(np.concatenate([same, part]))
    numbers, counts, *figures = np.concatenate(found, axis=1)
    return _Parts(numbers.astype(np.int64), counts > 0, *figures)


class _Program:
    """Columns: y by stage and part, F and B by stage, T, then e by run or what runs sum up to, and
    the whole numbers last."""

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
        self.parts = parts = _parts(layers)
        least = np.where(layers.seconds < NEVER, layers.seconds, 0.0)
        self.scale = max(float(least.max()) * float(layers.number.sum()), 1e-300)
        self.seconds, self.step = parts.seconds / self.scale, parts.step / self.scale
        self.forward = parts.counts * layers.forward[parts.number] / self.scale
        self.backward = parts.counts * layers.backward[parts.number] / self.scale
        self.crossing = [c / self.scale for c in crossing]
        num, width = schedule.num_stages, len(parts.number)
        self.y: Index = np.arange(num * width).reshape(num, width)
        self.run_columns = num * width + np.arange(2 * num).reshape(2, num)
        self.end = num * (width + 2)
        self.num_columns = self.end + 1
        self.num_rows = 0
        self.terms: list[tuple[Index, Index, Array]] = []  # rows, columns, values
        self.limits: list[tuple[Array, Array]] = []  # of rows

    def _new(self, *shape: int) -> Index:
        """Return new columns."""
        size = math.prod(shape)
        self.num_columns += size
        return np.arange(self.num_columns - size, self.num_columns).reshape(shape)

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
        program.setOptionValue("mip_rel_gap", MIP_GAP)
        if not self.whole:
            program.setOptionValue("simplex_strategy", PRIMAL)
        model, least = self._model(), 0.0
        for nodes, heuristics in zip(MAX_NODES, (False, True), strict=True):
            program.setOptionValue("mip_max_nodes", nodes)
            for heuristic in HEURISTICS:
                program.setOptionValue(f"mip_heuristic_{heuristic}", heuristics)
            program.passModel(model)
            program.run()
            status, info = program.getModelStatus(), program.getInfo()
            if status == highspy.HighsModelStatus.kInfeasible:
                return math.inf
            ended = status == highspy.HighsModelStatus.kOptimal
            if self.whole:
                least = max(least, info.mip_dual_bound)
            elif ended:
                least = info.objective_function_value
            if ended or not self.whole:
                break
        return max(0.0, least * (1 - TRUSTED) - TRUSTED) * self.scale if least < 1e20 else 0.0

    def _add(
        self,
        *terms: tuple[Index, Array | float],
        least: Array | float = 0.0,
        most: Array | float = math.inf,
    ) -> None:
        """Add rows with the sums of `terms`, columns [rows, ...] and their values, between `least`
        and `most` [rows]."""
        count = len(terms[0][0])
        numbers = self.num_rows + np.arange(count)
        self.num_rows += count
        for columns, values in terms:
            width = columns.size // max(count, 1)
            each = np.broadcast_to(values, columns.shape).ravel()
            self.terms.append((np.repeat(numbers, width), columns.ravel(), each))
        self.limits.append((np.broadcast_to(least, count), np.broadcast_to(most, count)))

    def _by_mesh(self, columns: Index) -> Index:
        """Return columns [stages, ...] by mesh: [meshes, chunks, ...]."""
        chunks, meshes = self.schedule.chunks, self.schedule.num_meshes
        return columns.reshape(chunks, meshes, *columns.shape[1:]).swapaxes(0, 1)

    def _add_runs(self) -> None:
        """Add the ends of all runs and of the step."""
        schedule = self.schedule
        num, last, count = schedule.num_meshes, schedule.num_stages - 1, schedule.num_microbatches
        ends = self._new(2, last + 1, count)  # forward or backward, stage, microbatch
        of_mesh = self._by_mesh(self.y)
        for mesh in range(num):
            back, stage, microbatch = schedule.runs(mesh).T
            end, run = ends[back, stage, microbatch], self.run_columns[back, stage]
            self._add((end[:1], 1.0), (run[:1], -1.0))
            self._add((end[1:], 1.0), (run[1:], -1.0), (end[:-1], -1.0))
            source = stage + 2 * back - 1
            reads = (source >= 0) & (source <= last)
            self._add(
                (end[reads], 1.0),
                (run[reads], -1.0),
                (ends[back, source.clip(0, last), microbatch][reads], -1.0),
                least=np.array(self.crossing)[np.minimum(source, stage)[reads] % num],
            )
            turns = (back == 1) & ~reads
            own = ends[0, stage[turns], microbatch[turns]]
            self._add((end[turns], 1.0), (run[turns], -1.0), (own, -1.0))
            update = of_mesh[mesh : mesh + 1]
            self._add((np.array([self.end]), 1.0), (end[-1:], -1.0), (update, -self.step))

    def _add_waits(self, count: int) -> None:
        """Add what each mesh works, and waits before each of its chunks, there and back: the first
        two inequalities of interleaved_bound.py with the crossings d.

        Columns: `before` [2, stages + 1], the seconds forward and back of all stages before one,
        and `own` [2, meshes, chunks + 1], of those on its mesh.
        """
        schedule = self.schedule
        num, meshes, chunks = schedule.num_stages, schedule.num_meshes, schedule.chunks
        ran = float(min(meshes, count))  # forwards of each chunk before that a mesh may have run
        before, own = self._new(2, num + 1), self._new(2, meshes, chunks + 1)
        for sums, runs in (
            (before, self.run_columns),
            (own, self._by_mesh(self.run_columns.T).transpose(2, 0, 1)),
        ):
            self._add((sums[..., 0].ravel(), 1.0), most=0.0)
            self._add(
                (sums[..., 1:].ravel(), 1.0),
                (sums[..., :-1].ravel(), -1.0),
                (runs.ravel(), -1.0),
                most=0.0,
            )
        end = np.full(num, self.end)
        mesh, chunk = np.arange(num) % meshes, np.arange(num) // meshes
        way = np.cumsum([0.0, *(self.crossing[s % meshes] for s in range(num - 1))])
        work = ((own[0, mesh, -1], -float(count)), (own[1, mesh, -1], -float(count)))
        there = ((before[0, :-1], -1.0), (own[0, mesh, chunk], ran))
        back = ((before[1, :-1], -1.0), (own[1, mesh, chunk], ran))
        # The step seconds of a mesh are summed once.
        tail = self._new(meshes)
        self._add((tail, 1.0), (self._by_mesh(self.y), -self.step))
        self._add((end, 1.0), *work, *there, (tail[mesh], -1.0), least=way)
        self._add((end, 1.0), *work, *there, *back, least=2 * way)

    def _add_stages(self) -> None:
        """Add the layers of stages, their seconds and their bytes."""
        layers, schedule, parts = self.layers, self.schedule, self.parts
        forward, backward = self.run_columns
        self._add((forward, 1.0), (self.y, -self.forward))
        self._add((backward, 1.0), (self.y, -self.backward))
        self._add((forward, 1.0), (backward, 1.0), (self.y, -self.seconds))
        for number, count in enumerate(layers.number.tolist()):
            own = self.y[:, (parts.number == number) & parts.counts]
            others = self.y[:, (parts.number == number) & ~parts.counts]
            more, less = (layers.follow[:, number] / self.scale).tolist()
            if more > 0:
                runs = self.seconds + more * ((parts.number == number) & parts.counts)
                self._add((forward, 1.0), (backward, 1.0), (self.y, -runs), least=-more - less)
            self._add((own.reshape(1, -1), 1.0), least=count, most=count)
            if others.size:
                self._add((own, 1.0), (others, -1.0), most=0.0)
        if math.isfinite(layers.memory):
            held = np.array(schedule.in_flight, dtype=np.float64)[:, None]
            size = (parts.state + held * parts.activation) / layers.memory  # [stages, parts]
            meshes, chunks = schedule.num_meshes, schedule.chunks
            size = size.reshape(chunks, meshes, -1).swapaxes(0, 1)
            self._add((self._by_mesh(self.y), size), least=-math.inf, most=1.0)
        self._add((self.y[:, parts.counts], 1.0), least=1.0)
        for part in self._wholes():
            self._add((part.reshape(1, -1), 1.0), (self._new(1), -1.0), most=0.0)

    def _wholes(self) -> list[Index]:
        """Return the columns of each part that has a whole number of layers."""
        if not self.whole:
            return []
        schedule, own = self.schedule, self.y[:, self.parts.counts]
        if schedule.num_stages * schedule.num_microbatches <= MAX_BY_STAGE:
            return list(own)
        return [own[mesh :: schedule.num_meshes].ravel() for mesh in range(schedule.num_meshes)]

    def _model(self) -> highspy.HighsLp:
        layers, num = self.layers, self.schedule.num_stages
        low, high = np.zeros(self.num_columns), np.full(self.num_columns, np.inf)
        for number, there in ((layers.first, 0), (layers.last, num - 1)):
            if layers.number[number] == 1:
                high[np.delete(self.y[:, self.parts.number == number], there, axis=0)] = 0.0
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.num_columns, self.num_rows
        cost = np.zeros(self.num_columns)
        cost[self.end] = 1.0
        if self.whole:
            integers = len(self._wholes())
            continuous, integer = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
            model.integrality_ = [continuous] * (self.num_columns - integers) + [integer] * integers
        model.col_cost_, model.col_lower_, model.col_upper_ = cost, low, high
        model.row_lower_, model.row_upper_ = (
            np.concatenate(side) for side in zip(*self.limits, strict=True)
        )
        rows, columns, values = (np.concatenate(part) for part in zip(*self.terms, strict=True))
        kept = np.flatnonzero(values)
        kept = kept[np.argsort(rows[kept], kind="stable")]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.searchsorted(rows[kept], np.arange(self.num_rows + 1))
        model.a_matrix_.index_, model.a_matrix_.value_ = columns[kept], values[kept]
        return model
