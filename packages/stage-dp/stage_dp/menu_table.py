"""A layer menu at one microbatch count, as arrays; and the layer ranges by their classes."""

from __future__ import annotations

import math

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from alpa_interchange.menu import JointProblem, LayerFloor, LayerRow, MeshMenu, PricedFloor
from stage_dp.schedules import SCHEDULE_RULES

EVEN = 1e-14  # of a sum: growths of it, layer by layer, that differ by less are rounding
Array = NDArray[np.float64]
Index = NDArray[np.int64]

COLUMNS = 10  # of rows
FORWARD, BACKWARD, WEIGHT, SPLIT, STEP, STATE, ACTIVATION, DELAYED, WAITING, TRANSIENT = range(
    COLUMNS
)
ADDED = [n for n in range(COLUMNS) if n != TRANSIENT]  # columns that add up over layers

AskedFloors = dict[tuple[int, int], dict[int, LayerFloor]]
"""Sharper floors by mesh and class and by number of microbatches."""

FEW_LAYERS = 12  # up to which every choice is looked at
SAME = 1 - 1e-12  # sums of the same figures in another order differ by rounding


@frozen(eq=False)
class ClassRows:
    """The rows of a class on a mesh that the samples of a microbatch allow.

    `columns` [rows, COLUMNS]: seconds of one microbatch forward, backward (whole), of it by weight,
    more backward where it is split, step seconds, bytes of state, of activations, of delayed
    cotangents, of a microbatch more that waits for its backward by weight, of temporaries.
    `number`: positions in the menu.
    """

    columns: Array
    layout_in: Index
    layout_out: Index
    number: Index


class Sequences:
    """Layer ranges by their sequence of classes: equal sequences have one number.

    `number[l, k]` is that of layers l..k (-1 unless l < k). `parent` and `last` [sequences] are
    the sequence without its last layer (-1: none) and the class of that layer; parents come first.
    """

    def __init__(self, class_of_layer: tuple[int, ...]) -> None:
        layers = len(class_of_layer)
        self.number: Index = np.full((layers + 1, layers + 1), -1, dtype=np.int64)
        known: dict[tuple[int, int], int] = {}
        parent: list[int] = []
        last: list[int] = []
        for start in range(layers):
            before = -1
            for stop in range(start + 1, layers + 1):
                key = (before, class_of_layer[stop - 1])
                if key not in known:
                    known[key] = len(parent)
                    parent.append(before)
                    last.append(key[1])
                before = known[key]
                self.number[start, stop] = before
        self.parent, self.last = parent, last
        self._counts: dict[tuple[int, ...], Array] = {}
        self._follows: dict[tuple[int, ...], Array] = {}

    def __len__(self) -> int:
        return len(self.parent)

    def counts(self, classes: tuple[int, ...]) -> Array:
        """Return how many layers of each class there are: [sequences, classes]."""
        if classes not in self._counts:
            position = {c: i for i, c in enumerate(classes)}
            result = np.zeros((len(self), len(classes)))
            for sequence, (parent, last) in enumerate(zip(self.parent, self.last, strict=True)):
                if parent >= 0:
                    result[sequence] = result[parent]
                result[sequence, position[last]] += 1
            self._counts[classes] = result
        return self._counts[classes]

    def follows(self, classes: tuple[int, ...]) -> Array:
        """Return how many layers of each class follow one of it: [sequences, classes]."""
        if classes not in self._follows:
            position = {c: i for i, c in enumerate(classes)}
            result = np.zeros((len(self), len(classes)))
            for sequence, (parent, last) in enumerate(zip(self.parent, self.last, strict=True)):
                if parent >= 0:
                    result[sequence] = result[parent]
                    result[sequence, position[last]] += self.last[parent] == last
            self._follows[classes] = result
        return self._follows[classes]

    def classes(self, sequence: int) -> tuple[int, ...]:
        """Return the classes of the layers, first to last."""
        result = []
        while sequence >= 0:
            result.append(self.last[sequence])
            sequence = self.parent[sequence]
        return tuple(reversed(result))


class MenuTable:
    """The menu for `num_microbatches`: `rows[mesh][class]`, `conversion[mesh]` [layouts, layouts].

    `memory[mesh]`: bytes of a device; `usable[mesh]`: whether the mesh's rows allow any microbatch
    of this size. `shared`: floors asked for by the tables of all microbatch counts.
    """

    def __init__(
        self, problem: JointProblem, num_microbatches: int, shared: AskedFloors | None = None
    ) -> None:
        self.problem = problem
        self.num_microbatches = num_microbatches
        self.samples = problem.batch_size // num_microbatches
        # Of many layers a row that only is less by weight is left out: it is worth next to nothing.
        splits = any(SCHEDULE_RULES[name].splits_backward for name in problem.schedules)
        self.splits = splits and problem.menu.num_layers <= FEW_LAYERS
        classes = sorted(set(problem.menu.class_of_layer))
        meshes = problem.menu.meshes
        self.rows: list[dict[int, ClassRows]] = [
            {c: class_rows(mesh.rows[c], self.samples, self.splits) for c in classes}
            for mesh in meshes
        ]
        self.conversion = [_conversions(mesh, self.samples) for mesh in meshes]
        self.memory = [
            problem.device_groups[mesh.submesh.host_group].memory * (1 + 1e-12) for mesh in meshes
        ]
        self.usable = [any(len(r.number) for r in rows.values()) for rows in self.rows]
        self._shared: AskedFloors = {} if shared is None else shared
        # By mesh and class: the floors at hand, and the number of microbatches they are of.
        self._known: dict[tuple[int, int], tuple[LayerFloor, ...]] = {}
        self._from: dict[tuple[int, int], int] = {}

    def floors(self, mesh: int, number: int) -> tuple[LayerFloor, ...]:
        """Return the floors of a class, the sharpest that were asked for or taken over."""
        known = self._known.get((mesh, number))
        return self.problem.menu.meshes[mesh].floors[number] if known is None else known

    def take_over(self, mesh: int, number: int) -> bool:
        """Take over floors of a class that were asked for at a number of microbatches that divides
        this one; return whether there are sharper ones than those at hand.

        All ways here are ways there, and B t + u of none falls with B.
        """
        least = self.problem.menu.meshes[mesh].floors
        known = self._shared.get((mesh, number), {})
        counts = [count for count in known if self.num_microbatches % count == 0]
        count = max(counts, default=0)
        if count <= self._from.get((mesh, number), 0) or len(least[number]) != 1:
            return False
        self._from[mesh, number] = count
        floor, samples = known[count], self.problem.batch_size // count
        self._known[mesh, number] = (
            evolve(
                least[number][0],
                state_bytes=floor.state_bytes,
                follow_seconds=floor.follow_seconds,
                run_seconds=floor.run_seconds,
                kept=floor.kept,
                priced=tuple(
                    PricedFloor(
                        price=one.price,
                        step_seconds=count * one.seconds.value(samples) + one.step_seconds,
                    )
                    for one in floor.priced
                ),
            ),
        )
        return True

    def ask(self, mesh: int, number: int) -> bool:
        """Ask for sharper floors of a class; return whether there are any that were not asked
        for before."""
        more, key = self.problem.floors_at, (mesh, number)
        if more is None or self._from.get(key) == self.num_microbatches:
            return False
        if not self.problem.menu.meshes[mesh].floors:
            return False
        self._from[key] = self.num_microbatches
        self._known[key] = found = more(mesh, number, self.samples)
        if len(found) == 1:
            self._shared.setdefault(key, {})[self.num_microbatches] = found[0]
        return True

    def change(self, mesh: int, before: ClassRows, after: ClassRows) -> Array:
        """Return the seconds between rows of consecutive layers: [rows before, rows after]."""
        return self.conversion[mesh][np.ix_(before.layout_out, after.layout_in)]


def class_rows(rows: tuple[LayerRow, ...], samples: int, splits: bool) -> ClassRows:
    """Return the rows that divide `samples`, without those that another row beats in all.

    `splits`: there are schedules with a split backward.
    """
    kept = [n for n, row in enumerate(rows) if samples % row.batch_split == 0]
    columns = np.array([_columns(rows[n], samples) for n in kept]).reshape(-1, COLUMNS)
    layout_in = np.array([rows[n].layout_in for n in kept], dtype=np.int64)
    layout_out = np.array([rows[n].layout_out for n in kept], dtype=np.int64)
    best = unbeaten(compared(columns, splits), layout_in * 4096 + layout_out)
    number = np.array(kept, dtype=np.int64)
    return ClassRows(columns[best], layout_in[best], layout_out[best], number[best])


def compared(columns: Array, splits: bool) -> Array:
    """Return the columns of which less is better, as far as schedules look at them.

    Neither more nor less by weight is better for all pipelines where the backward is split: of the
    same whole, more sends cotangents earlier, and leaves more to the end.
    """
    if not splits:
        return columns[:, [FORWARD, BACKWARD, STEP, STATE, ACTIVATION, TRANSIENT]]
    rest = columns[:, [n for n in range(COLUMNS) if n != WEIGHT]]
    by_weight = columns[:, [WEIGHT]]
    return np.concatenate([rest, by_weight, columns[:, [BACKWARD]] - by_weight], axis=1)


def _columns(row: LayerRow, samples: int) -> list[float]:
    weight = row.backward_weight.value(samples)
    return [
        row.forward.value(samples),
        row.backward_input.value(samples) + weight,
        weight,
        row.split_seconds.value(samples),
        row.step_seconds,
        row.state_bytes + row.kept_bytes.value(samples),
        row.activation_bytes.value(samples),
        row.delayed_bytes.value(samples),
        row.waiting(samples),
        row.transient_bytes.value(samples),
    ]


def _conversions(mesh: MeshMenu, samples: int) -> Array:
    size = len(mesh.layouts)
    matrix = np.full((size, size), math.inf)
    np.fill_diagonal(matrix, 0.0)
    for (before, after), cost in mesh.conversion.items():
        matrix[before, after] = cost.value(samples)
    return matrix


def unbeaten(columns: Array, group: Index) -> Index:
    """Return the rows of `columns` that no other row of their group equals or beats in all.

    Of equal rows the first stays. Rows are in the order of their columns' sum.
    """
    if not len(columns):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((*columns.T[::-1], group))
    columns, group = columns[order], group[order]
    kept: list[int] = []
    alive = np.ones(len(order), dtype=bool)
    for n in range(len(order)):
        if not alive[n]:
            continue
        kept.append(n)
        rest = slice(n + 1, None)
        beaten = (columns[rest] >= columns[n] * SAME).all(axis=1) & (group[rest] == group[n])
        alive[rest] &= ~beaten
    return order[np.array(kept, dtype=np.int64)]
