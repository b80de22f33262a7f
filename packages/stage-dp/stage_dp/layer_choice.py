"""One row per layer: least seconds within a number of bytes.

With layers 1..L, rows s, seconds c_i(s), bytes m_i(s) and transition seconds R_i(r, s):

    minimise  sum_i c_i(s_i) + R_i(s_{i-1}, s_i)   subject to   sum_i m_i(s_i) <= E

Exact, for real-valued bytes. A path through layer i that ends in row s is a label (time T, bytes
M); of two labels the one with no less time and no less bytes is dropped, so equal sums of identical
layers are kept once. -> _front()

    bound(l) = min over paths of sum (c + R + l m) - l E   <= optimum, for every price l >= 0

The best price comes from bisection, where each path that fits is a plan. A label is dropped when T
plus the priced cost of its best completion is no better than the plan in hand. -> _priced(),
_best_price()
"""

from __future__ import annotations

import math

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from stage_dp.menu_table import EVEN

Array = NDArray[np.float64]


@frozen
class LayerRows:
    """Seconds and bytes per layer [strategies], and transitions into each layer."""

    seconds: tuple[Array, ...]
    bytes: tuple[Array, ...]
    transitions: tuple[Array, ...]  # entry i: from layer i - 1; entry 0 is unused
    names: tuple[NDArray[np.int64], ...]  # strategy numbers behind the entries


def choose_rows(
    rows: LayerRows, memory: float, tolerance: float = 1e-12
) -> tuple[tuple[int, ...], float, float] | None:
    """Return strategies, seconds and the priced lower bound, or None if nothing fits.

    A plan within `tolerance` of the bound is not improved, and none by less than that.
    """
    allowed = memory * (1 + 1e-12)
    if sum(float(b.min()) for b in rows.bytes) > allowed:
        return None
    price, bound, best = _best_price(rows, allowed, tolerance)
    if best is None or bound < best[1] * (1 - tolerance):
        better = _front(rows, allowed, price, best[1] * (1 - tolerance) if best else math.inf)
        best = better or best
    if best is None:
        return None
    choice = tuple(int(rows.names[k][s]) for k, s in enumerate(best[0]))
    return choice, best[1], min(bound, best[1])


def _alike(rows: LayerRows, layer: int) -> bool:
    """Return whether a layer and the change into it are those of the layer before."""
    return (
        layer > 1
        and rows.seconds[layer] is rows.seconds[layer - 1]
        and rows.bytes[layer] is rows.bytes[layer - 1]
        and rows.transitions[layer] is rows.transitions[layer - 1]
    )


def _even(grown: Array, scale: float) -> bool:
    return float(grown.max() - grown.min()) <= EVEN * scale


def _priced(rows: LayerRows, price: float) -> tuple[list[Array], list[bool]]:
    """Return for each layer and strategy the least priced cost of the layers after it, and where
    that is what the layer before has less a constant, the two being alike."""
    num = len(rows.seconds)
    after = np.zeros(len(rows.seconds[-1]))
    result, steady = [after], [False] * num
    k = num - 1
    while k > 0:
        own = rows.seconds[k] + price * rows.bytes[k]
        before = (rows.transitions[k] + (own + after)).min(axis=1)
        result.append(before)
        # Equal layers soon cost the same each: the powers of their min-plus matrix grow evenly.
        if _alike(rows, k) and _even(grown := before - after, float(before.max())):
            step = float(grown.min())
            steady[k] = True
            while k > 1 and _alike(rows, k):
                k -= 1
                before = before + step
                result.append(before)
                steady[k] = _alike(rows, k)
        after = before
        k -= 1
    return result[::-1], steady


def _path(rows: LayerRows, price: float) -> tuple[list[int], float, float]:
    """Return the path of least priced cost, its seconds and its bytes."""
    after, steady = _priced(rows, price)
    choice = [int(np.argmin(rows.seconds[0] + price * rows.bytes[0] + after[0]))]
    seconds, size = float(rows.seconds[0][choice[0]]), float(rows.bytes[0][choice[0]])
    for k in range(1, len(rows.seconds)):
        if not (steady[k] and choice[-1] == choice[-2]):
            step = rows.transitions[k][choice[-1]] + rows.seconds[k]
            pick = int(np.argmin(step + price * rows.bytes[k] + after[k]))
            choice.append(pick)
            time, own = float(step[pick]), float(rows.bytes[k][pick])
        else:
            choice.append(choice[-1])
        seconds += time
        size += own
    return choice, seconds, size


def _best_price(
    rows: LayerRows, memory: float, tolerance: float
) -> tuple[float, float, tuple[list[int], float] | None]:
    """Return the price with the highest bound, that bound, and the best plan met that fits."""
    choice, seconds, size = _path(rows, 0.0)
    if size <= memory:
        return 0.0, seconds, (choice, seconds)
    # Two paths that span the price: one too large, one that fits. Their crossing gives the next.
    over = (seconds, size)
    large = choice
    best: tuple[list[int], float] | None = None
    under = (0.0, 0.0)
    price, bound = 0.0, seconds
    scale = max(seconds, 1e-30) / max(memory, 1e-30)
    for exponent in range(0, 60, 3):
        choice, seconds, size = _path(rows, scale * 2.0**exponent)
        bound_here = seconds + scale * 2.0**exponent * (size - memory)
        if bound_here > bound:
            price, bound = scale * 2.0**exponent, bound_here
        if size <= memory:
            under, best = (seconds, size), (choice, seconds)
            break
        over, large = (seconds, size), choice
    if best is None:
        return price, bound, None
    small = best[0]
    for _ in range(100):
        crossing = (under[0] - over[0]) / (over[1] - under[1])
        choice, seconds, size = _path(rows, crossing)
        bound_here = seconds + crossing * (size - memory)
        if bound_here > bound:
            price, bound = crossing, bound_here
        value = seconds + crossing * size
        if value >= under[0] + crossing * under[1] - 1e-12 * abs(value):
            break
        if size <= memory:
            under, small = (seconds, size), choice
            if seconds < best[1]:
                best = (choice, seconds)
        else:
            over, large = (seconds, size), choice
        if bound >= best[1] * (1 - tolerance):
            return price, bound, best
    for first, second in ((large, small), (small, large)):
        mixed = _mixed(rows, first, second, memory)
        if mixed is not None and mixed[1] < best[1]:
            best = mixed
    return price, bound, best


def _mixed(
    rows: LayerRows, first: list[int], second: list[int], memory: float
) -> tuple[list[int], float] | None:
    """Return the best plan that fits and follows `first` up to a layer, `second` from there on."""
    num = len(first)

    def sums(choice: list[int]) -> tuple[Array, Array]:
        seconds = [rows.seconds[k][s] for k, s in enumerate(choice)]
        for k in range(1, num):
            seconds[k] += rows.transitions[k][choice[k - 1], choice[k]]
        return np.cumsum(seconds), np.cumsum([rows.bytes[k][s] for k, s in enumerate(choice)])

    time_first, size_first = sums(first)
    time_second, size_second = sums(second)
    change = np.array(
        [
            rows.transitions[k][first[k - 1], second[k]]
            - rows.transitions[k][second[k - 1], second[k]]
            for k in range(1, num)
        ]
    )
    with np.errstate(invalid="ignore"):
        time = time_first[:-1] + time_second[-1] - time_second[:-1] + change
    size = size_first[:-1] + size_second[-1] - size_second[:-1]
    time = np.where((size <= memory) & np.isfinite(time), time, np.inf)
    if not len(time) or not np.isfinite(time.min()):
        return None
    at = int(np.argmin(time)) + 1
    return [*first[:at], *second[at:]], float(time[at - 1])


def _front(
    rows: LayerRows, memory: float, price: float, incumbent: float
) -> tuple[list[int], float] | None:
    """Return the best path that fits and takes less than `incumbent`, by labels; None if none."""
    after, _ = _priced(rows, price)
    num, limit = len(rows.seconds), incumbent
    remaining = np.append(np.cumsum([float(b.min()) for b in rows.bytes][::-1])[::-1], 0.0)
    useful = _useful(rows, price, after, limit + price * memory)
    labels: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    time, size, at = np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.int64)
    for k in range(num):
        some = useful[k]
        own, room = rows.bytes[k][some], memory - remaining[k + 1]
        spent = rows.seconds[k][some]
        if k:
            spent = rows.transitions[k][np.ix_(at, some)] + spent
        times, sizes = time[:, None] + spent, size[:, None] + own
        promise = times + after[k][some] + price * (sizes - memory)
        origin, column = np.nonzero((sizes <= room) & (promise < limit))
        times, sizes = times[origin, column], sizes[origin, column]
        # By strategy, then by bytes: what takes no less time than one before it is dropped.
        order = np.lexsort((times, sizes, column))
        times, column = times[order], column[order]
        apart = column * (-2.0 * float(times.max(initial=0.0)))
        least = np.minimum.accumulate(times + apart) - apart
        first = np.ones(len(order), dtype=bool)
        first[1:] = (column[1:] != column[:-1]) | (times[1:] < least[:-1] * (1 - 1e-13))
        order = order[first]
        time, size, at = times[first], sizes[order], some[column[first]]
        labels.append((origin[order], at))
        if not len(at):
            return None
    end = int(np.argmin(time))
    if time[end] >= limit:
        return None
    seconds, choice = float(time[end]), []
    for origin, at in reversed(labels):
        choice.append(int(at[end]))
        end = int(origin[end])
    return choice[::-1], seconds


def _useful(
    rows: LayerRows, price: float, after: list[Array], limit: float
) -> list[NDArray[np.int64]]:
    """Return the strategies of each layer that are on a path of less priced cost than `limit`."""
    result = []
    before = np.zeros(1)
    for k in range(len(rows.seconds)):
        own = rows.seconds[k] + price * rows.bytes[k]
        before = own + ((before[:, None] + rows.transitions[k]).min(axis=0) if k else 0.0)
        result.append(np.flatnonzero(before + after[k] < limit))
    return result
