"""What stages cost at one microbatch count: bounds of all, exact rows of those asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np
from attrs import frozen

from stage_dp.cell_bounds import RowArrays, fastest, floor_arrays, row_arrays, within_memory
from stage_dp.joint_chain import StageChoice
from stage_dp.joint_schedules import JointRule
from stage_dp.joint_sweep import Space
from stage_dp.layer_choice import LayerRows, choose_rows
from stage_dp.menu_table import (
    ACTIVATION,
    ADDED,
    BACKWARD,
    FORWARD,
    STATE,
    STEP,
    TRANSIENT,
    Array,
    ClassRows,
    MenuTable,
    unbeaten,
)

LEVELS = 12  # places told apart where memory binds; those before count as the last of them
MAX_HELD = 24  # different numbers in flight whose bounds are computed; others are rounded down
TOLERANCE = 3e-3  # of a stage's seconds, while pipelines are looked for
MAX_TRANSIENTS = 3  # limits on transient bytes tried for one stage


@frozen(eq=False)
class StageBounds:
    """Bounds [sequences, kinds, levels]: of t, of B t + u, and of t + u."""

    seconds: Array
    busy: Array
    once: Array


class CountCosts:
    """Costs at the microbatch count of `table` on the submeshes of `space`."""

    def __init__(self, table: MenuTable, space: Space) -> None:
        self.table, self.space = table, space
        self.tolerance = TOLERANCE
        menus = table.problem.menu.meshes
        kinds = space.pool.kinds
        self.meshes = [
            m for m, menu in enumerate(menus) if table.usable[m] and menu.submesh in kinds
        ]
        self.kind = np.array([kinds.index(menus[m].submesh) for m in self.meshes], dtype=np.int64)
        self.layers = Counter(table.problem.menu.class_of_layer)
        self._rows: dict[bool, RowArrays] = {}
        if self.meshes:
            rows = row_arrays(table, self.meshes)
            self._rows = {False: rows, True: floor_arrays(table, self.meshes) or rows}
        self._made: dict[tuple[bool, tuple[int, ...]], StageBounds] = {}
        self._choices: dict[tuple[int, int, int], list[StageChoice]] = {}
        self._mesh_seconds: Array | None = None

    @property
    def same_proof(self) -> bool:
        """Return whether bounds hold for the rows alone."""
        return self._rows[True] is self._rows[False]

    @property
    def forward_share(self) -> float:
        """Return the largest share that a forward can have in forward plus backward."""
        if not self.same_proof:
            return 1.0
        shares = [0.0]
        for m in self.meshes:
            for rows in self.table.rows[m].values():
                whole = rows.columns[:, FORWARD] + rows.columns[:, BACKWARD]
                part = rows.columns[:, FORWARD] / np.where(whole > 0, whole, 1.0)
                shares += part.tolist()
            change = self.table.conversion[m]
            if (change[np.isfinite(change)] > 0).any():
                shares.append(0.5)
        return max(shares)

    def bounds(self, proof: bool, held: tuple[int, ...] = ()) -> StageBounds:
        """Return bounds of the rows, or with `proof` of what lower bounds may count.

        `held`: microbatches in flight of each level; none: without memory, one level.
        """
        proof = proof and not self.same_proof
        key = (proof, held)
        if key not in self._made:
            count = self.table.num_microbatches
            weights = (0.0, 1 / count, 1.0)
            rows, sequences = self._rows[proof], self.space.sequences
            if held:
                asked = _rounded(held)
                numbers = np.array(sorted(set(asked)), dtype=np.int64)
                level = np.searchsorted(numbers, asked)
                least = [
                    self._by_kind(within_memory(rows, sequences, q, numbers, self.layers))[
                        :, :, level
                    ]
                    for q in weights[:2]
                ]
                # Only for the first stage, where this is nearly as good as a third priced bound.
                least.append(np.maximum(least[0], self.bounds(proof).once))
            else:
                values = fastest(rows, sequences, weights)
                if not proof:
                    self._mesh_seconds = values[:, :, 0]
                least = [self._by_kind(values[:, :, n : n + 1]) for n in range(3)]
            self._made[key] = StageBounds(least[0], count * least[1], least[2])
        return self._made[key]

    def _by_kind(self, values: Array) -> Array:
        """Return the least over the meshes of each kind."""
        shape = (values.shape[0], len(self.space.pool.kinds), values.shape[2])
        result = np.full(shape, np.inf)
        for j, kind in enumerate(self.kind):
            np.minimum(result[:, kind], values[:, j], out=result[:, kind])
        return result

    def sharpen(self) -> None:
        """Solve stages nearly exactly from now on."""
        self.tolerance = 1e-4
        self._choices.clear()

    def choices(self, start: int, stop: int, kind: int, held: int) -> list[StageChoice]:
        """Return the ways to run layers start..stop that are best for t or for t + u / B within
        memory, on every logical mesh of the kind."""
        sequence = int(self.space.sequences.number[start, stop])
        key = (sequence, kind, held)
        if key not in self._choices:
            self._choices[key] = self._solved(sequence, kind, held)
        return [
            StageChoice(start, stop, c.mesh, c.columns, c.layout_in, c.layout_out, c.rows)
            for c in self._choices[key]
        ]

    def _solved(self, sequence: int, kind: int, held: int) -> list[StageChoice]:
        if self._mesh_seconds is None:
            self.bounds(False)
        assert self._mesh_seconds is not None
        result: list[StageChoice] = []
        own = [j for j in range(len(self.meshes)) if self.kind[j] == kind]
        own.sort(key=lambda j: float(self._mesh_seconds[sequence, j]))  # type: ignore[index]
        count = self.table.num_microbatches
        least_busy = np.inf
        for j in own:
            # Another logical mesh is of use if it can be quicker with its step seconds.
            if count * self._mesh_seconds[sequence, j] >= least_busy:
                break
            for weight in (0.0, 1 / count):
                choice = self._best_rows(sequence, self.meshes[j], held, weight)
                if choice is not None:
                    result.append(choice)
                    busy = count * choice.seconds + float(choice.columns[STEP])
                    least_busy = min(least_busy, busy)
        if not result:
            return []
        figures = np.array([[c.seconds, c.columns[STEP]] for c in result])
        layouts = np.array([c.layout_in * 4096 + c.layout_out for c in result])
        return [result[n] for n in unbeaten(figures, layouts)]

    def _best_rows(self, sequence: int, mesh: int, held: int, weight: float) -> StageChoice | None:
        """Return the rows with the least t + weight u in memory; transients up to a few limits."""
        classes = self.space.sequences.classes(sequence)
        all_rows = self.table.rows[mesh]
        if any(not len(all_rows[c].number) for c in classes):
            return None
        kept = set(classes)
        limits = sorted({float(x) for c in kept for x in all_rows[c].columns[:, TRANSIENT]})
        least = max(float(all_rows[c].columns[:, TRANSIENT].min()) for c in kept)
        limits = [x for x in limits if x >= least][::-1]
        if len(limits) > MAX_TRANSIENTS:
            picks = np.linspace(0, len(limits) - 1, MAX_TRANSIENTS).round().astype(int)
            limits = [limits[p] for p in dict.fromkeys(picks.tolist())]
        best: tuple[float, tuple[int, ...]] | None = None
        for limit in limits:
            rows = self._layer_rows(mesh, classes, held, weight, limit)
            found = choose_rows(rows, self.table.memory[mesh] - limit, self.tolerance)
            if found is not None and (best is None or found[1] < best[0]):
                best = (found[1], found[0])
            if found is not None and limit == limits[0] and found[1] <= found[2] * (1 + 1e-9):
                free = choose_rows(rows, np.inf)
                if free is not None and found[1] <= free[1] * (1 + 1e-12):
                    break
        return None if best is None else self._stage(mesh, classes, best[1])

    def _layer_rows(
        self, mesh: int, classes: tuple[int, ...], held: int, weight: float, limit: float
    ) -> LayerRows:
        parts = {c: self._part(mesh, c, held, weight, limit) for c in set(classes)}
        changes = {
            (a, b): self.table.conversion[mesh][np.ix_(parts[a][3], parts[b][4])]
            for a, b in set(zip(classes, classes[1:], strict=False))
        }
        return LayerRows(
            tuple(parts[c][0] for c in classes),
            tuple(parts[c][1] for c in classes),
            tuple(
                changes[classes[n - 1], c] if n else np.zeros((0, 0)) for n, c in enumerate(classes)
            ),
            tuple(parts[c][2] for c in classes),
        )

    def _part(self, mesh: int, c: int, held: int, weight: float, limit: float) -> tuple:  # type: ignore[type-arg]
        rows = self.table.rows[mesh][c]
        keep = np.flatnonzero(rows.columns[:, TRANSIENT] <= limit)
        columns = rows.columns[keep]
        return (
            columns[:, FORWARD] + columns[:, BACKWARD] + weight * columns[:, STEP],
            columns[:, STATE] + held * columns[:, ACTIVATION],
            keep,
            rows.layout_out[keep],
            rows.layout_in[keep],
        )

    def _stage(self, mesh: int, classes: tuple[int, ...], picks: tuple[int, ...]) -> StageChoice:
        rows: list[ClassRows] = [self.table.rows[mesh][c] for c in classes]
        figures = np.array([r.columns[p] for r, p in zip(rows, picks, strict=True)])
        columns = np.zeros(7)
        columns[ADDED] = figures[:, ADDED].sum(axis=0)
        columns[TRANSIENT] = figures[:, TRANSIENT].max()
        outs = [int(r.layout_out[p]) for r, p in zip(rows, picks, strict=True)]
        ins = [int(r.layout_in[p]) for r, p in zip(rows, picks, strict=True)]
        change = sum(
            float(self.table.conversion[mesh][a, b]) for a, b in zip(outs, ins[1:], strict=False)
        )
        columns[FORWARD] += change / 2
        columns[BACKWARD] += change / 2
        return StageChoice(
            0,
            len(classes),
            mesh,
            columns,
            ins[0],
            outs[-1],
            tuple(int(r.number[p]) for r, p in zip(rows, picks, strict=True)),
        )


def _rounded(held: tuple[int, ...]) -> list[int]:
    """Return the numbers in flight, of many some rounded down, which bounds may be."""
    distinct = sorted(set(held))
    if len(distinct) > MAX_HELD:
        steps = np.geomspace(distinct[0], distinct[-1], MAX_HELD)
        some = sorted({distinct[int(np.searchsorted(distinct, s * (1 + 1e-9))) - 1] for s in steps})
        return [some[int(np.searchsorted(some, k, side="right")) - 1] for k in held]
    return list(held)


def held_by_place(rule: JointRule, num_microbatches: int, most: int) -> tuple[int, ...]:
    """Return the microbatches in flight of the stages at places 1 .. most."""
    return tuple(rule.in_flight(place, num_microbatches) for place in range(1, most + 1))
