"""Lower bounds on every layer range and mesh at once: path minima over layers, memory by prices.

For a range of layers on a mesh, with seconds t, step seconds u, state s and activation bytes a of
the rows, k microbatches in flight, M bytes and a weight q >= 0 on the step seconds,

    bound = max over prices p >= 0 of  min over row choices of sum (t + q u + p (s + k a)) - p M

holds for every choice that fits. For equal layers without conversions the best price is one at
which two neighbours of the lower hull of the rows tie, and the bound is then that of mixing rows in
any proportion: so prices are the ties of the hulls of the most frequent classes. -> hull_prices()
A range whose least bytes exceed M has bound inf. Transient bytes: of each class the least, of these
the largest, comes off M.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen

from stage_dp.menu_table import (
    ACTIVATION,
    BACKWARD,
    COLUMNS,
    FORWARD,
    STATE,
    STEP,
    TRANSIENT,
    Array,
    Index,
    MenuTable,
    Sequences,
)

# Per class; bounds within memory of more let rows follow each other for nothing. With 0, bounds of
# Swin (benchmarks/stage_dp_galvatron.py, 7 to 11 rows) are 1 % lower, those of GPTs, whose menus
# have 14 to 46, the same; without limit 24 layers on 8 devices take 52 CPU s instead of 4.
EXACT_ROWS = 12
MAX_PRICES = 10  # per mesh and in-flight count; more tighten ranges of mixed classes only


@frozen(eq=False)
class RowArrays:
    """Rows of all meshes and classes, padded with inf: [meshes, classes, rows].

    `change[a, b]` [meshes, rows, rows]: seconds between consecutive layers of classes a and b;
    absent where nothing is to be converted.
    """

    seconds: Array
    step: Array
    state: Array
    activation: Array
    transient: Array
    memory: Array  # [meshes]
    change: dict[tuple[int, int], Array]
    classes: tuple[int, ...]


def row_arrays(table: MenuTable, meshes: Sequence[int]) -> RowArrays:
    """Return the rows of `meshes` at the table's microbatch count."""
    classes = tuple(sorted(table.rows[meshes[0]]))
    width = max(len(table.rows[m][c].number) for m in meshes for c in classes)
    shape = (len(meshes), len(classes), max(1, width))
    figures = np.full((COLUMNS, *shape), np.inf)
    for j, m in enumerate(meshes):
        for i, c in enumerate(classes):
            rows = table.rows[m][c]
            figures[:, j, i, : len(rows.number)] = rows.columns.T
    change = {}
    for i, a in enumerate(classes):
        for k, b in enumerate(classes):
            matrix = np.zeros((shape[0], shape[2], shape[2]))
            for j, m in enumerate(meshes):
                part = table.change(m, table.rows[m][a], table.rows[m][b])
                matrix[j, : part.shape[0], : part.shape[1]] = part
            if matrix.any():
                change[i, k] = matrix
    return RowArrays(
        figures[FORWARD] + figures[BACKWARD],
        figures[STEP],
        figures[STATE],
        figures[ACTIVATION],
        figures[TRANSIENT],
        np.array([table.memory[m] for m in meshes]),
        change,
        classes,
    )


def floor_arrays(table: MenuTable, meshes: Sequence[int]) -> RowArrays | None:
    """Return what bounds may count where menus have floors: floors in place of rows."""
    menus = [table.problem.menu.meshes[m] for m in meshes]
    if not any(menu.floors for menu in menus):
        return None
    rows = row_arrays(table, meshes)
    shape = rows.seconds.shape
    width = max([shape[2], *(len(f) for menu in menus for f in menu.floors)])
    padded = np.full((5, shape[0], shape[1], width), np.inf)
    change = {key: np.zeros((shape[0], width, width)) for key in rows.change}
    for j, menu in enumerate(menus):
        if not menu.floors:
            own = (rows.seconds, rows.step, rows.state, rows.activation, rows.transient)
            for figure, column in zip(padded, own, strict=True):
                figure[j, :, : shape[2]] = column[j]
            for key, matrix in rows.change.items():
                change[key][j, : shape[2], : shape[2]] = matrix[j]
            continue
        for i, c in enumerate(rows.classes):
            for n, floor in enumerate(menu.floors[c]):
                padded[:, j, i, n] = (
                    floor.seconds.value(table.samples),
                    floor.step_seconds,
                    floor.state_bytes,
                    floor.activation_bytes.value(table.samples),
                    0.0,
                )
    seconds, step, state, activation, transient = padded
    return RowArrays(seconds, step, state, activation, transient, rows.memory, change, rows.classes)


def fastest(rows: RowArrays, sequences: Sequences, weights: Sequence[float]) -> Array:
    """Return the bounds without memory for each weight on step seconds: [sequences, meshes,
    weights]."""
    own = np.stack([rows.seconds + q * rows.step if q else rows.seconds for q in weights], axis=1)
    return _path_minima(rows, sequences, own)


def within_memory(
    rows: RowArrays,
    sequences: Sequences,
    weight: float,
    in_flight: Index,
    layers: Counter[int],
) -> Array:
    """Return the bounds at each number of microbatches in flight: [sequences, meshes, in_flight].

    `layers` counts the layers of each class.
    """
    seconds = rows.seconds + (weight * rows.step if weight else 0.0)
    held = in_flight.astype(np.float64)
    size = rows.state[:, None] + held[None, :, None, None] * rows.activation[:, None]
    prices = _prices(rows, seconds, size, layers)  # [meshes, in_flight, prices]
    meshes, levels, count = prices.shape
    finite = np.where(np.isfinite(size), size, 0.0)
    own = seconds[:, None, None] + prices[..., None, None] * finite[:, :, None]
    own = own.reshape(meshes, levels * count, *seconds.shape[1:])
    least_size = size.min(axis=3)  # [meshes, in_flight, classes]
    least_transient = rows.transient.min(axis=2)
    position = {c: i for i, c in enumerate(rows.classes)}
    result = np.empty((len(sequences), meshes, levels))
    needs: list[Array] = []
    transients: list[Array] = []

    def reduce(sequence: int, value: Array) -> None:
        c, parent = position[sequences.last[sequence]], sequences.parent[sequence]
        need, transient = least_size[:, :, c], least_transient[:, c]
        if parent >= 0:
            need, transient = need + needs[parent], np.maximum(transient, transients[parent])
        needs.append(need)
        transients.append(transient)
        room = rows.memory - np.where(np.isfinite(transient), transient, 0.0)
        priced = value.reshape(meshes, levels, count) - prices * room[:, None, None]
        bound = priced.max(axis=2)
        bound[(need > room[:, None]) | ~np.isfinite(transient)[:, None]] = np.inf
        result[sequence] = bound

    # With 36 rows of GPT-39B's layers the changes took 90 % of a search of minutes. Most rows take
    # the layout that they leave, so that little of the bound is lost.
    if rows.seconds.shape[2] > EXACT_ROWS:
        rows = evolve(rows, change={})
    _path_minima(rows, sequences, own, reduce)
    return result


def _path_minima(rows: RowArrays, sequences: Sequences, own: Array, reduce: object = None) -> Array:
    """Return the least sum of `own` [meshes, weights, classes, rows] and changes over the layers of
    each sequence: [sequences, meshes, weights], or hand each to `reduce`."""
    position = {c: i for i, c in enumerate(rows.classes)}
    if not rows.change:  # the best row of a layer is the best whatever stands beside it
        own = own.min(axis=3, keepdims=True)
    children = Counter(sequences.parent)
    ends: dict[int, Array] = {}
    result = np.empty((0 if callable(reduce) else len(sequences), *own.shape[:2]))
    for sequence, (parent, last) in enumerate(zip(sequences.parent, sequences.last, strict=True)):
        c = position[last]
        value = own[:, :, c]
        if parent >= 0:
            change = rows.change.get((position[sequences.last[parent]], c))
            before = ends[parent]
            if change is None:
                value = value + before.min(axis=2)[:, :, None]
            else:
                value = value + (before[:, :, :, None] + change[:, None]).min(axis=2)
            children[parent] -= 1
            if not children[parent]:
                del ends[parent]
        if children[sequence]:
            ends[sequence] = value
        if callable(reduce):
            reduce(sequence, value.min(axis=2))
        else:
            result[sequence] = value.min(axis=2)
    return result


def _prices(rows: RowArrays, seconds: Array, size: Array, layers: Counter[int]) -> Array:
    """Return prices to try: [meshes, in_flight, prices], 0 first."""
    order = sorted(range(len(rows.classes)), key=lambda i: -layers[rows.classes[i]])
    ties = [hull_prices(seconds[:, None, i], size[:, :, i]) for i in order]
    # The most frequent class gives all its ties, the others fill up what is left.
    prices = np.concatenate([np.zeros((*size.shape[:2], 1)), *ties], axis=2)
    return prices[:, :, : max(MAX_PRICES, 1 + ties[0].shape[2])]


def hull_prices(seconds: Array, size: Array) -> Array:
    """Return the prices of bytes at which neighbours on the lower hull tie: [..., rows - 1].

    `seconds` and `size` [..., rows]; unused places hold 0.
    """
    seconds, size = np.broadcast_arrays(seconds, size)
    width = seconds.shape[-1]
    result = np.zeros((*seconds.shape[:-1], max(width - 1, 0)))
    at = np.argmin(seconds, axis=-1)[..., None]
    for step in range(width - 1):
        here, bytes_here = (np.take_along_axis(x, at, axis=-1) for x in (seconds, size))
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = (seconds - here) / (bytes_here - size)
        slope = np.where((size < bytes_here) & np.isfinite(seconds), slope, np.inf)
        following = np.argmin(slope, axis=-1)[..., None]
        price = np.take_along_axis(slope, following, axis=-1)
        found = np.isfinite(price)
        result[..., step] = np.where(found, price, 0.0)[..., 0]
        at = np.where(found, following, at)
    return result
