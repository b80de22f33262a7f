"""What stages cost at one microbatch count: bounds of all, exact rows of those asked for."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from attrs import evolve, field, frozen

from stage_dp.cell_bounds import (
    Corners,
    RowArrays,
    between_layers,
    fastest,
    floor_arrays,
    least_parts,
    most_delayed,
    row_arrays,
    within_memory,
)
from stage_dp.device_pool import CoarsePool, DevicePool
from stage_dp.joint_bound import Chain
from stage_dp.joint_chain import StageChoice
from stage_dp.joint_sweep import Space
from stage_dp.joint_window import DeviceSeconds
from stage_dp.layer_choice import LayerRows, choose_rows
from stage_dp.menu_table import (
    ACTIVATION,
    ADDED,
    BACKWARD,
    COLUMNS,
    DELAYED,
    FORWARD,
    SPLIT,
    STATE,
    STEP,
    TRANSIENT,
    Array,
    ClassRows,
    Index,
    MenuTable,
    unbeaten,
)
from stage_dp.schedules import ScheduleRule

LEVELS = 12  # places told apart where memory binds; those before count as the last of them
MAX_HELD = 24  # different numbers in flight whose bounds are computed; others are rounded down
TOLERANCE = 1e-2  # of a stage's seconds, while pipelines are looked for; 3e-3 takes 1.4 x as long
MAX_TRANSIENTS = 3  # limits on transient bytes that fit, tried for one stage
# Prices of bytes by which these are chosen, over that of the slowest row's seconds for all memory:
# two rows tie at one that grows as their bytes differ less, up to 2^14 where that is 6e-5 of the
# memory. Coarser prices only order the limits less well.
PRICES = np.concatenate([[0.0], 2.0 ** np.arange(-6, 15)])


@frozen(eq=False)
class StageBounds:
    """Bounds [sequences, kinds, levels]: of t, of B t + u, and of t + u. `parts` [sequences, kinds,
    3]: of the forward, the forward with backward by input, the backward. `delayed` [sequences,
    kinds, levels]: the most backwards by weight that wait at once. `of_mesh` [sequences, meshes,
    levels]: of t + u / B on each mesh. `limit`: of pipelines of less than so many seconds. `taken`:
    what they take of the devices of pools. `quick`: the bound on pipelines that these give,
    pipelines that take no more, and the limit up to which they were looked at, by whether the
    backward is split."""

    seconds: Array
    busy: Array
    once: Array
    parts: Array
    delayed: Array
    of_mesh: Array
    limit: float
    quick: dict[bool, tuple[float, list[Chain], float]] = field(factory=dict)
    taken: dict[DevicePool | CoarsePool, DeviceSeconds] = field(factory=dict)

    def device_seconds(self, space: Space) -> DeviceSeconds:
        """Return what stages take of the devices of a space."""
        pool = space.pool
        if pool not in self.taken:
            self.taken[pool] = DeviceSeconds.of(space.sequences, pool, self.busy)
        return self.taken[pool]


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
        self._corners: Corners = {}
        if self.meshes:
            rows = row_arrays(table, self.meshes)
            floors = floor_arrays(table, self.meshes, rows, self._corners)
            self._rows = {False: rows, True: floors or rows}
        self._made: dict[tuple[bool, tuple[int, ...], int], StageBounds] = {}
        self._times_asked: Counter[int] = Counter()
        self._choices: dict[tuple[int, int, int, int], list[StageChoice]] = {}
        self._mesh_seconds: Array | None = None

    @property
    def same_proof(self) -> bool:
        """Return whether bounds hold for the rows alone."""
        return self._rows[True] is self._rows[False]

    @cached_property
    def share(self) -> float:
        """Return the largest share of a forward in forward plus backward that bounds may count
        on."""
        if not self.same_proof:
            return 1.0
        shares = [0.0]
        for m in self.meshes:
            for rows in self.table.rows[m].values():
                forward = rows.columns[:, FORWARD]
                whole = forward + rows.columns[:, BACKWARD]
                shares += (forward[whole > 0] / whole[whole > 0]).tolist()
            change = self.table.conversion[m]
            if (change[np.isfinite(change)] > 0).any():
                shares.append(0.5)
        return max(shares)

    def bounds(
        self,
        proof: bool,
        held: tuple[int, ...] = (),
        limit: float = np.inf,
        num_delayed: int = 0,
    ) -> StageBounds:
        """Return bounds of the rows, or with `proof` of what lower bounds may count.

        `held`: microbatches in flight of each level; none: without memory, one level. With them
        stages that no pipeline of less than `limit` seconds has may be inf. `num_delayed`: of how
        many there is besides what the backward by weight reads, which is split where that is any.
        """
        proof = proof and not self.same_proof
        key = (proof, held, num_delayed)
        if key not in self._made or self._made[key].limit < limit:
            up_to = np.inf
            count = self.table.num_microbatches
            weights = (0.0, 1 / count, 1.0)
            rows, sequences = self._rows[proof], self.space.sequences
            numbers, level = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
            if proof:
                more = between_layers(rows, sequences) / count
            if held:
                some, up_to = self._possible(proof, limit), limit
                asked = _rounded(held)
                numbers = np.array(sorted(set(asked)), dtype=np.int64)
                level = np.searchsorted(numbers, asked)
                values = [
                    within_memory(rows, sequences, q, numbers, self.layers, some, num_delayed)
                    for q in weights[:2]
                ]
                if proof:
                    values = [one + more[:, :, None] for one in values]
                of_mesh = values[1][:, :, level]
                least = [self._by_kind(one)[:, :, level] for one in values]
                # Only for the first stage, where this is nearly as good as a third priced bound.
                once = self.bounds(proof, num_delayed=num_delayed).once
                least.append(np.maximum(least[0], once))
            else:
                fast = fastest(rows, sequences, weights, split=num_delayed > 0)
                if proof:
                    fast += more[:, :, None]
                elif not num_delayed:
                    self._mesh_seconds = fast[:, :, 0]
                of_mesh = fast[:, :, 1:2]
                least = [self._by_kind(fast[:, :, n : n + 1]) for n in range(3)]
            parts = self._by_kind(least_parts(rows, sequences))
            waiting = most_delayed(rows, sequences, numbers)[:, :, level]
            delayed = np.maximum(-self._by_kind(-waiting), 0.0)
            self._made[key] = StageBounds(
                least[0], count * least[1], least[2], parts, delayed, of_mesh, up_to
            )
        return self._made[key]

    def _possible(self, proof: bool, limit: float) -> Index | None:
        """Return the sequences of stages that pipelines of less than `limit` seconds can have; None
        if any."""
        window = self.bounds(proof).device_seconds(self.space).window(limit)
        if window is None:
            return None
        starts, stops, _ = window.stages
        return np.unique(self.space.sequences.number[starts, stops])

    def ask(
        self, chains: Sequence[Chain], held: tuple[int, ...] = (), num_delayed: int = 0
    ) -> bool:
        """Ask for sharper floors of what bounds the stages of the first of these pipelines that has
        any, the last of which is at the first level of `held`; return whether there are."""
        if self.same_proof:
            return False
        of_mesh = self._made[True, held, num_delayed].of_mesh
        for stages in chains:
            wanted = []
            for place, (start, stop, kind) in enumerate(reversed(stages)):
                sequence = int(self.space.sequences.number[start, stop])
                own = np.flatnonzero(self.kind == kind)
                level = min(place, of_mesh.shape[2] - 1)
                at = int(own[np.argmin(of_mesh[sequence, own, level])])
                wanted += [(at, c) for c in sorted(set(self.space.sequences.classes(sequence)))]
            if self._ask(list(dict.fromkeys(wanted))):
                return True
        return False

    def ask_of(self, position: int, classes: Sequence[int]) -> bool:
        """Ask for sharper floors of classes on a mesh; return whether there are any."""
        return not self.same_proof and self._ask([(position, c) for c in classes])

    def _ask(self, wanted: Sequence[tuple[int, int]]) -> bool:
        """Ask for sharper floors of (mesh, class); where other microbatch counts asked for some of
        them, take over all that these know instead. Return whether there are any."""
        if any(self._sharper(self.table.take_over, one) for one in wanted):
            rest = [(at, c) for at in range(len(self.meshes)) for c in self.layers]
            new = {*wanted, *(one for one in rest if self._sharper(self.table.take_over, one))}
        else:
            new = {one for one in wanted if self._sharper(self.table.ask, one)}
        self._times_asked.update({at for at, _ in new})
        if new:
            floors = floor_arrays(self.table, self.meshes, self.rows, self._corners)
            self._rows[True] = floors or self._rows[False]
            self._made = {key: made for key, made in self._made.items() if not key[0]}
        return bool(new)

    def _sharper(self, ask: Callable[[int, int], bool], wanted: tuple[int, int]) -> bool:
        """Return whether the table has sharper floors of (mesh, class) after `ask`."""
        at, number = wanted
        new = ask(self.meshes[at], number)
        if new:
            del self._corners[self.meshes[at], number]
        return new

    def times_asked(self, position: int) -> int:
        """Return how often floors of a mesh were made sharper."""
        return self._times_asked[position]

    def _by_kind(self, values: Array) -> Array:
        """Return the least over the meshes of each kind."""
        shape = (values.shape[0], len(self.space.pool.kinds), values.shape[2])
        result = np.full(shape, np.inf)
        for j, kind in enumerate(self.kind):
            np.minimum(result[:, kind], values[:, j], out=result[:, kind])
        return result

    @property
    def rows(self) -> RowArrays:
        """Return the rows of all meshes."""
        return self._rows[False]

    @property
    def bounded_rows(self) -> RowArrays:
        """Return the rows of all meshes that bounds count."""
        return self._rows[True]

    def sharpen(self) -> None:
        """Solve stages nearly exactly from now on."""
        self.tolerance = 1e-4
        self._choices.clear()

    def choices(
        self, start: int, stop: int, kind: int, held: int, num_delayed: int = 0
    ) -> list[StageChoice]:
        """Return the ways to run layers start..stop that are best for t or for t + u / B within
        memory, on every logical mesh of the kind."""
        sequence = int(self.space.sequences.number[start, stop])
        key = (sequence, kind, held, num_delayed)
        if key not in self._choices:
            self._choices[key] = self._solved(sequence, kind, held, num_delayed)
        return [c.at(start, stop) for c in self._choices[key]]

    def best(
        self, start: int, stop: int, mesh: int, held: int, weight: float, num_delayed: int = 0
    ) -> StageChoice | None:
        """Return the way to run layers start..stop on one mesh that is best for t + `weight` u with
        `held` microbatches in flight; None if none fits."""
        sequence = int(self.space.sequences.number[start, stop])
        found = self._best_rows(sequence, mesh, held, weight, num_delayed)
        return None if found is None else evolve(found, layer_start=start, layer_stop=stop)

    def _solved(self, sequence: int, kind: int, held: int, num_delayed: int) -> list[StageChoice]:
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
                choice = self._best_rows(sequence, self.meshes[j], held, weight, num_delayed)
                if choice is not None:
                    result.append(choice)
                    busy = count * choice.seconds + float(choice.columns[STEP])
                    least_busy = min(least_busy, busy)
        if not result:
            return []
        figures = np.array([[c.seconds, c.columns[STEP]] for c in result])
        layouts = np.array([c.layout_in * 4096 + c.layout_out for c in result])
        return [result[n] for n in unbeaten(figures, layouts)]

    def _best_rows(
        self, sequence: int, mesh: int, held: int, weight: float, num_delayed: int
    ) -> StageChoice | None:
        classes = self.space.sequences.classes(sequence)
        held_by_layer = (held,) * len(classes)
        found = self.best_rows(mesh, classes, held_by_layer, weight, num_delayed=num_delayed)
        return None if found is None else self.stage(mesh, classes, found)

    def best_rows(
        self,
        mesh: int,
        classes: tuple[int, ...],
        held: tuple[int, ...],
        weight: float,
        cuts: tuple[int, ...] = (),
        num_delayed: int = 0,
        withheld: float = 0.0,
    ) -> tuple[int, ...] | None:
        """Return the rows of layers with the least t + weight u in memory, as positions in
        `ClassRows`; transients up to a few limits.

        `held` [layers] microbatches in flight, with what the backward by weight reads of
        `num_delayed`; nothing is converted before the layers at `cuts`. The memory is that of the
        mesh less `withheld` bytes.
        """
        if any(not len(self.table.rows[mesh][c].number) for c in classes):
            return None
        limits, least = self._by_transients(mesh, classes, held, weight, num_delayed)
        memory = self.table.memory[mesh] - withheld
        best: tuple[float, tuple[int, ...]] | None = None
        tried = 0
        for n in np.argsort(least, kind="stable"):
            enough = best is not None and least[n] >= best[0] * (1 - self.tolerance)
            if math.isinf(least[n]) or enough or tried == MAX_TRANSIENTS:
                break
            limit = float(limits[n])
            rows = self._layer_rows(mesh, classes, held, weight, limit, cuts, num_delayed)
            found = choose_rows(rows, memory - limit, self.tolerance)
            if found is None:
                continue
            tried += 1
            if best is None or found[1] < best[0]:
                best = (found[1], found[0])
        return None if best is None else best[1]

    def _by_transients(
        self,
        mesh: int,
        classes: tuple[int, ...],
        held: tuple[int, ...],
        weight: float,
        num_delayed: int,
    ) -> tuple[Array, Array]:
        """Return the limits on transient bytes that rows may keep to, and bounds on t + weight u of
        the layers within each: with bytes at some prices, without conversions."""
        rows = self.table.rows[mesh]
        limits = np.unique(np.concatenate([rows[c].columns[:, TRANSIENT] for c in set(classes)]))
        memory = self.table.memory[mesh]
        slowest = max(
            float(rows[c].columns[:, [FORWARD, BACKWARD]].sum(axis=1).max()) for c in set(classes)
        )
        prices = slowest / memory * PRICES[:, None]
        total = -prices * (memory - limits)
        for (c, kept), number in Counter(zip(classes, held, strict=True)).items():
            seconds, bytes = self._priced_columns(mesh, c, kept, weight, num_delayed)
            transients = rows[c].columns[:, TRANSIENT]
            order = np.argsort(transients)
            priced = np.minimum.accumulate((seconds + prices * bytes)[:, order], axis=1)
            at = np.searchsorted(transients[order], limits, side="right") - 1
            total += number * np.where(at < 0, np.inf, priced[:, at])
        return limits, total.max(axis=0)

    def _priced_columns(
        self, mesh: int, c: int, held: int, weight: float, num_delayed: int
    ) -> tuple[Array, Array]:
        """Return t + weight u and the bytes of a class' rows, without transients."""
        columns = self.table.rows[mesh][c].columns
        seconds = columns[:, FORWARD] + columns[:, BACKWARD] + weight * columns[:, STEP]
        return (
            seconds + (columns[:, SPLIT] if num_delayed else 0.0),
            columns[:, STATE] + held * columns[:, ACTIVATION] + num_delayed * columns[:, DELAYED],
        )

    def _layer_rows(
        self,
        mesh: int,
        classes: tuple[int, ...],
        held: tuple[int, ...],
        weight: float,
        limit: float,
        cuts: tuple[int, ...],
        num_delayed: int,
    ) -> LayerRows:
        ways = list(zip(classes, held, strict=True))
        parts = {way: self._part(mesh, *way, weight, limit, num_delayed) for way in set(ways)}
        changes = {
            (a, b): self.table.conversion[mesh][np.ix_(parts[a][3], parts[b][4])]
            for a, b in set(itertools.pairwise(ways))
        }
        into = [np.zeros((0, 0)), *(changes[pair] for pair in itertools.pairwise(ways))]
        for cut in cuts:
            into[cut] = np.zeros_like(into[cut])
        return LayerRows(
            tuple(parts[way][0] for way in ways),
            tuple(parts[way][1] for way in ways),
            tuple(into),
            tuple(parts[way][2] for way in ways),
        )

    def _part(
        self, mesh: int, c: int, held: int, weight: float, limit: float, num_delayed: int
    ) -> tuple[Array, Array, Index, Index, Index]:
        rows = self.table.rows[mesh][c]
        keep = np.flatnonzero(rows.columns[:, TRANSIENT] <= limit)
        seconds, bytes = self._priced_columns(mesh, c, held, weight, num_delayed)
        return seconds[keep], bytes[keep], keep, rows.layout_out[keep], rows.layout_in[keep]

    def stage(self, mesh: int, classes: tuple[int, ...], picks: tuple[int, ...]) -> StageChoice:
        """Return layers 0.. with these rows as a stage."""
        rows: list[ClassRows] = [self.table.rows[mesh][c] for c in classes]
        figures = np.array([r.columns[p] for r, p in zip(rows, picks, strict=True)])
        columns = np.zeros(COLUMNS)
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


def held_by_place(rule: ScheduleRule, num_microbatches: int, most: int) -> tuple[int, ...]:
    """Return the microbatches in flight of the stages at places 1 .. most."""
    return tuple(rule.least_at(place, num_microbatches) for place in range(1, most + 1))
