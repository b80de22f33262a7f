"""Lower bounds on every layer range and mesh at once: path minima over layers, memory by prices.

For a range of layers on a mesh, with seconds t, step seconds u, state s and activation bytes a of
the rows, k microbatches in flight, M bytes and a weight q >= 0 on the step seconds,

    bound = max over prices p >= 0 of  min over row choices of sum (t + q u + p (s + k a)) - p M

holds for every choice that fits. For equal layers without conversions the best price is one at
which two neighbours of the lower hull of the rows tie, and the bound is then that of mixing rows in
any proportion: so prices are the ties of the hulls of the most frequent classes. -> hull_prices()
Floors of layers that follow one another are raised per step.          -> between_layers()
A range whose least bytes exceed M has bound inf. Transient bytes: of each class the least, of these
the largest, comes off M. The layers of the most frequent class that keep little, in transformers
those computed again from their input, are a whole number x: the bound is the least of any x, at
which their own transient bytes come off M, too.                                 -> _whole_layers()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from stage_dp.floor_rows import FLOOR_COLUMNS, floor_rows
from stage_dp.menu_table import (
    ACTIVATION,
    BACKWARD,
    COLUMNS,
    EVEN,
    FORWARD,
    STATE,
    STEP,
    TRANSIENT,
    WEIGHT,
    Array,
    Index,
    MenuTable,
    Sequences,
)

# Per class; bounds within memory of more let rows follow each other for nothing. With 0, bounds of
# Swin (benchmarks/stage_dp_galvatron.py, 7 to 11 rows) are 1 % lower, those of GPTs, whose menus
# have 14 to 46, the same; without limit 24 layers on 8 devices take 52 CPU s instead of 4.
EXACT_ROWS = 12
Corners = dict[tuple[int, int], tuple[Array, Array, Array]]
"""By mesh and class: rows that stand for floors, the least parts of their seconds, and what a layer
after one of its class takes more and a run less."""

MAX_PRICES = 10  # per mesh and in-flight count; more tighten ranges of mixed classes only


@frozen(eq=False)
class RowArrays:
    """Rows of all meshes and classes, padded with inf: [meshes, classes, rows].

    `change[a, b]` [meshes, rows, rows]: seconds between consecutive layers of classes a and b;
    absent where nothing is to be converted. `parts` [meshes, classes, 3]: the least forward,
    forward with backward by input, and backward. `split` and `delayed`: seconds that a split
    backward takes more, and the bytes that its part by weight reads more; `waiting`: those of one
    more microbatch that waits for it. `raised`: the seconds per step that a layer after one of its
    class takes more, and a run of such layers less.
    """

    seconds: Array
    step: Array
    state: Array
    activation: Array
    transient: Array
    split: Array
    delayed: Array
    waiting: Array
    parts: Array
    memory: Array  # [meshes]
    change: dict[tuple[int, int], Array]
    classes: tuple[int, ...]
    raised: Array  # [2, meshes, classes]


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
    seconds = figures[FORWARD] + figures[BACKWARD]
    weight = np.where(np.isfinite(seconds), figures[WEIGHT], 0.0)
    parts = (figures[FORWARD], seconds - weight, figures[BACKWARD])
    split, delayed, waiting = _least_split(table, meshes, classes, shape)
    return RowArrays(
        seconds,
        figures[STEP],
        figures[STATE],
        figures[ACTIVATION],
        figures[TRANSIENT],
        split,
        delayed,
        waiting,
        np.stack([part.min(axis=2) for part in parts], axis=2),
        np.array([table.memory[m] for m in meshes]),
        change,
        classes,
        np.zeros((2, *shape[:2])),
    )


def _least_split(
    table: MenuTable, meshes: Sequence[int], classes: Sequence[int], shape: tuple[int, ...]
) -> Array:
    """Return [3, *shape] the least seconds and bytes more of a split backward, and the least bytes
    of a microbatch that waits, of rows that others beat in all else, too."""
    menus, samples = [table.problem.menu.meshes[m] for m in meshes], table.samples
    figures = [
        [
            (
                row.split_seconds.value(samples),
                row.delayed_bytes.value(samples),
                row.waiting(samples),
            )
            for row in menu.rows[c]
        ]
        or [(np.inf,) * 3]
        for menu in menus
        for c in classes
    ]
    least = np.array([np.min(rows, axis=0) for rows in figures]).T
    return np.broadcast_to(least.reshape(3, len(meshes), len(classes), 1), (3, *shape))


def floor_arrays(
    table: MenuTable, meshes: Sequence[int], rows: RowArrays, known: Corners
) -> RowArrays | None:
    """Return what bounds may count where menus have floors: floors in place of `rows`, those of
    row_arrays(). `known` are the corners of floors by mesh and class, to which those that lack are
    added."""
    menus = [table.problem.menu.meshes[m] for m in meshes]
    if not any(menu.floors for menu in menus):
        return None
    corners: dict[tuple[int, int], Array] = {}
    parts, raised = rows.parts.copy(), rows.raised.copy()
    for j, m in enumerate(meshes):
        for i, c in enumerate(rows.classes if menus[j].floors else ()):
            if (m, c) not in known:
                known[m, c] = _corners(table, m, c)
            corners[j, i], parts[j, i], raised[:, j, i] = known[m, c]
    shape = rows.seconds.shape
    width = max([shape[2], *(len(found) for found in corners.values())])
    padded = np.full((FLOOR_COLUMNS, shape[0], shape[1], width), np.inf)
    change = {key: np.zeros((shape[0], width, width)) for key in rows.change}
    for j, menu in enumerate(menus):
        if menu.floors:
            for i in range(shape[1]):
                found = corners[j, i]
                padded[:, j, i, : len(found)] = found.T
            continue
        own = (rows.seconds, rows.step, rows.state, rows.activation, rows.transient)
        more = (rows.split, rows.delayed, rows.waiting)
        for figure, column in zip(padded, (*own, *more), strict=True):
            figure[j, :, : shape[2]] = column[j]
        for key, matrix in rows.change.items():
            change[key][j, : shape[2], : shape[2]] = matrix[j]
    change = {key: matrix for key, matrix in change.items() if matrix.any()}
    seconds, step, state, activation, transient, split, delayed, waiting = padded
    return RowArrays(
        seconds,
        step,
        state,
        activation,
        transient,
        split,
        delayed,
        waiting,
        parts,
        rows.memory,
        change,
        rows.classes,
        raised,
    )


def _corners(table: MenuTable, mesh: int, number: int) -> tuple[Array, Array, Array]:
    floors = table.floors(mesh, number)
    columns = ("forward", "forward_and_input", "backward")
    parts = [
        min((getattr(floor, name).value(table.samples) for floor in floors), default=np.inf)
        for name in columns
    ]
    raised = (  # of several, any may be the one that is met
        min((floor.follow_seconds for floor in floors), default=0.0),
        max((floor.run_seconds for floor in floors), default=0.0),
    )
    corners = floor_rows(floors, table.samples, table.num_microbatches)
    return corners, np.array(parts), np.array(raised)


def between_layers(rows: RowArrays, sequences: Sequences) -> Array:
    """Return the seconds per step by which floors of layers that follow one another exceed the sums
    of the floors of each: [sequences, meshes]."""
    follows = sequences.follows(rows.classes)
    runs = sequences.counts(rows.classes) - follows
    more = follows[:, None] * rows.raised[0] - runs[:, None] * rows.raised[1]
    return np.asarray(np.maximum(more, 0.0).sum(axis=2))


def least_parts(rows: RowArrays, sequences: Sequences) -> Array:
    """Return the least forward, forward with backward by input, and backward: [sequences, meshes,
    3]."""
    return _sums(sequences.counts(rows.classes), rows.parts.transpose(1, 0, 2))


def most_delayed(rows: RowArrays, sequences: Sequences, in_flight: Index) -> Array:
    """Return how many backwards by weight may wait beside the one under way and the microbatches
    in flight that a stage has anyway: [sequences, meshes, in_flight]."""
    counts = sequences.counts(rows.classes)

    def least(bytes: Array) -> Array:
        return _sums(counts, bytes.T)[:, :, None]

    state, activation = least(rows.state.min(axis=2)), least(rows.activation.min(axis=2))
    delayed = least(rows.delayed.min(axis=2))
    each = np.maximum(least(rows.waiting.min(axis=2)), 1e-9)
    with np.errstate(invalid="ignore"):
        room = rows.memory[None, :, None] - state - in_flight * activation - delayed
        found = np.floor(room / each * (1 + 1e-12))
    return np.where(found > 0, found, 0.0)


def fastest(
    rows: RowArrays, sequences: Sequences, weights: Sequence[float], split: bool = False
) -> Array:
    """Return the bounds without memory for each weight on step seconds: [sequences, meshes,
    weights]; `split`: with a split backward."""
    seconds = rows.seconds + rows.split if split else rows.seconds
    own = np.stack([seconds + q * rows.step if q else seconds for q in weights], axis=1)
    return _path_minima(rows, sequences, own)


def within_memory(
    rows: RowArrays,
    sequences: Sequences,
    weight: float,
    in_flight: Index,
    layers: Counter[int],
    some: Index | None = None,
    num_delayed: int = 0,
) -> Array:
    """Return the bounds at each number of microbatches in flight: [sequences, meshes, in_flight].

    `layers` counts the layers of each class. `some`: sequences that are looked at, of others the
    bound is inf; None: all. `num_delayed`: of how many there is what the backward by weight reads,
    which is split where that is any.
    """
    some = np.arange(len(sequences)) if some is None else some
    # With 36 rows of GPT-39B's layers the changes took 90 % of a search of minutes. Most rows take
    # the layout that they leave, so that little of the bound is lost.
    if rows.seconds.shape[2] > EXACT_ROWS:
        rows = evolve(rows, change={})
    seconds = rows.seconds + (weight * rows.step if weight else 0.0)
    held = in_flight.astype(np.float64)
    size = rows.state[:, None] + held[None, :, None, None] * rows.activation[:, None]
    if num_delayed:
        seconds = seconds + rows.split
        size = size + num_delayed * rows.delayed[:, None]
    prices = _prices(rows, seconds, size, layers)  # [meshes, in_flight, prices]
    meshes, levels, count = prices.shape
    finite = np.where(np.isfinite(size), size, 0.0)
    own = seconds[:, None, None] + prices[..., None, None] * finite[:, :, None]
    own = own.reshape(meshes, levels * count, *seconds.shape[1:])
    counts = sequences.counts(rows.classes)[some]
    need = _sums(counts, size.min(axis=3).transpose(2, 0, 1))
    least = rows.transient.min(axis=2)
    transient = np.where(counts[:, None, :] > 0, least[None], 0.0).max(axis=2)
    room = rows.memory - np.where(np.isfinite(transient), transient, 0.0)  # [sequences, meshes]
    if rows.change:
        priced = _path_minima(rows, sequences, own)[some]
    else:
        priced = _sums(counts, own.min(axis=3).transpose(2, 0, 1))
    priced = priced.reshape(-1, meshes, levels, count)
    priced -= prices * room[:, :, None, None]
    bound: Array = priced.max(axis=3)
    bound[(need > room[:, :, None]) | ~np.isfinite(transient)[:, :, None]] = np.inf
    if not rows.change:
        parts = own.reshape(meshes, levels, count, *seconds.shape[1:])
        whole = _whole_layers(rows, counts, layers, parts, prices, size)
        if whole is not None:
            bound = np.maximum(bound, whole)
    result = np.full((len(sequences), *bound.shape[1:]), np.inf)
    result[some] = bound
    return result


def _whole_layers(
    rows: RowArrays,
    counts: Array,
    layers: Counter[int],
    own: Array,
    prices: Array,
    size: Array,
) -> Array | None:
    """Return the bounds of `within_memory` where the layers of the most frequent class that keep
    little (`_lean`) are a whole number x of each stage's: [sequences, meshes, in_flight]; None
    where all rows keep about as much.

    At a price the bound is a line over x, so the highest of all prices is convex over x, and its
    least is found by halving. While one of the lean layers runs, its own temporaries are in memory.
    """
    main = rows.classes.index(max(layers, key=lambda c: layers[c]))
    used, lean = np.isfinite(rows.seconds[:, main]), _lean(rows.activation[:, main])
    some = np.flatnonzero((used & lean).any(axis=1) & (used & ~lean).any(axis=1))
    if not len(some):
        return None
    own, prices, size = own[some], prices[some], size[some]
    lean, transient = lean[some], rows.transient[some]
    number = counts[:, main, None, None]  # [sequences, 1, 1]
    others = counts.copy()
    others[:, main] = 0

    def least(values: Array, of: NDArray[np.bool_]) -> Array:
        """Return the least of `values` [meshes, ..., rows] where `of`."""
        shape = (len(of), *[1] * (values.ndim - 2), of.shape[1])
        return np.asarray(np.where(of.reshape(shape), values, np.inf).min(axis=-1))

    def sums(values: Array) -> Array:
        return _sums(others, np.moveaxis(values.min(axis=-1), -1, 0))

    rest, rest_bytes = sums(own), sums(size)
    working = transient.min(axis=2)  # inf of classes without rows, which nothing fits
    working = np.where((others[:, None, :] > 0) & np.isfinite(working), working, 0.0).max(axis=2)
    seconds = [least(own[..., main, :], of) for of in (lean, ~lean)]
    bytes = [least(size[..., main, :], of) for of in (lean, ~lean)]
    temporary = [least(transient[:, main], of) for of in (lean, ~lean)]

    def bound(x: Array) -> tuple[Array, Array]:
        """Return the bound of x lean layers, inf where they do not fit, and a slope of it."""
        most = np.broadcast_to(working[:, :, None], x.shape)
        for has, own_most in zip((x > 0, x < number), temporary, strict=True):
            most = np.where(has, np.maximum(most, own_most[:, None]), most)
        room = rows.memory[some, None] - most
        y = number - x
        each = rest + x[..., None] * seconds[0] + y[..., None] * seconds[1]
        each = each - prices * room[..., None]
        at = each.argmax(axis=3)[..., None]
        value = np.take_along_axis(each, at, axis=3)[..., 0]
        slope = np.broadcast_to(seconds[0] - seconds[1], each.shape)
        slope = np.take_along_axis(slope, at, axis=3)[..., 0]
        too_much = rest_bytes + x * bytes[0] + y * bytes[1] > room
        return np.where(too_much, np.inf, value), np.where(too_much, bytes[0] - bytes[1], slope)

    zero = np.zeros(rest_bytes.shape)
    best = np.minimum(bound(zero)[0], bound(zero + number)[0])
    low, high = zero + 1, zero + number - 1
    while (low <= high).any():
        middle = np.floor((low + high) / 2)
        value, slope = bound(np.clip(middle, 0, number))
        best = np.where(low <= high, np.minimum(best, value), best)
        low, high = np.where(slope < 0, middle + 1, low), np.where(slope < 0, high, middle - 1)
    result = np.zeros((len(counts), len(used), best.shape[2]))
    result[:, some] = best
    return result


def _lean(activation: Array) -> NDArray[np.bool_]:
    """Return which rows keep little, [meshes, rows]: within twice of the least."""
    return np.asarray(activation <= 2 * activation.min(axis=1, keepdims=True))


def _sums(counts: Array, values: Array) -> Array:
    """Return the sums of `values` [classes, ...] over the layers of each sequence: [sequences,
    ...]; inf where a class that it has is."""
    finite = np.isfinite(values)
    result: Array = np.tensordot(counts, np.where(finite, values, 0.0), axes=1)
    if not finite.all():
        lacking = np.tensordot(counts > 0, (~finite).astype(np.float64), axes=1) > 0
        result = np.where(lacking, np.inf, result)
    return result


def _path_minima(rows: RowArrays, sequences: Sequences, own: Array) -> Array:
    """Return the least sum of `own` [meshes, weights, classes, rows] and changes over the layers of
    each sequence: [sequences, meshes, weights]."""
    if not rows.change:  # the best row of a layer is the best whatever stands beside it
        return _sums(sequences.counts(rows.classes), own.min(axis=3).transpose(2, 0, 1))
    position = {c: i for i, c in enumerate(rows.classes)}
    children = Counter(sequences.parent)
    ends: dict[int, Array] = {}
    # What each further layer of the same class adds, [meshes, weights], nan where that is not the
    # same for all rows: after a few layers the powers of their min-plus matrix grow evenly.
    growth: dict[int, Array] = {}
    result = np.empty((len(sequences), *own.shape[:2]))
    for sequence, (parent, last) in enumerate(zip(sequences.parent, sequences.last, strict=True)):
        c = position[last]
        value = own[:, :, c]
        if parent >= 0:
            change = rows.change.get((position[sequences.last[parent]], c))
            before = ends[parent]
            again = sequences.last[parent] == last
            known = growth.get(parent) if again else None
            if change is None:
                value = value + before.min(axis=2)[:, :, None]
            elif known is None:
                value = value + (before[:, :, :, None] + change[:, None]).min(axis=2)
            else:
                rest = np.flatnonzero(np.isnan(known).any(axis=1))
                longer = value[rest] + (before[rest][..., None] + change[rest, None]).min(axis=2)
                value = before + known[:, :, None]
                value[rest] = longer
            if again and change is not None and children[sequence]:
                growth[sequence] = _even_growth(before, value)
            children[parent] -= 1
            if not children[parent]:
                del ends[parent]
        if children[sequence]:
            ends[sequence] = value
        result[sequence] = value.min(axis=2)
    return result


def _even_growth(before: Array, after: Array) -> Array:
    """Return by how much ends [meshes, weights, rows] grew, [meshes, weights]; nan where some grew
    more than others."""
    finite = np.isfinite(after)
    with np.errstate(invalid="ignore"):
        grown = after - before
    least = np.where(finite, grown, np.inf).min(axis=2)
    most = np.where(finite, grown, -np.inf).max(axis=2)
    even = most - least <= EVEN * np.where(finite, after, 0.0).max(axis=2)
    even &= (finite == np.isfinite(before)).all(axis=2)
    return np.where(even, least, np.nan)


def _prices(rows: RowArrays, seconds: Array, size: Array, layers: Counter[int]) -> Array:
    """Return prices to try: [meshes, in_flight, prices], 0 first."""
    order = sorted(range(len(rows.classes)), key=lambda i: -layers[rows.classes[i]])
    ties = [hull_prices(seconds[:, None, i], size[:, :, i]) for i in order]
    # The most frequent class gives all its ties, the others fill up what is left.
    prices = np.concatenate([np.zeros((*size.shape[:2], 1)), *ties], axis=2)
    prices = prices[:, :, : max(MAX_PRICES, 1 + ties[0].shape[2])]
    used: NDArray[np.bool_] = np.asarray(prices.any(axis=(0, 1)))
    used[0] = True
    return prices[:, :, used]


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
        if not found.any():
            break
        result[..., step] = np.where(found, price, 0.0)[..., 0]
        at = np.where(found, following, at)
    return result
