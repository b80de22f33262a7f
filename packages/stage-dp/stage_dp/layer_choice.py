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


def _priced(rows: LayerRows, price: float) -> list[Array]:
    """Return for each layer and strategy the least priced cost of the layers after it."""
    after = np.zeros(len(rows.seconds[-1]))
    result = [after]
    for k in range(len(rows.seconds) - 1, 0, -1):
        own = rows.seconds[k] + price * rows.bytes[k] + after
        after = (rows.transitions[k] + own[None, :]).min(axis=1)
        result.append(after)
    return result[::-1]


def _path(rows: LayerRows, price: float) -> tuple[list[int], float, float]:
    """Return the path of least priced cost, its seconds and its bytes."""
    after = _priced(rows, price)
    choice = [int(np.argmin(rows.seconds[0] + price * rows.bytes[0] + after[0]))]
    seconds, size = rows.seconds[0][choice[0]], rows.bytes[0][choice[0]]
    for k in range(1, len(rows.seconds)):
        step = rows.transitions[k][choice[-1]] + rows.seconds[k]
        pick = int(np.argmin(step + price * rows.bytes[k] + after[k]))
        choice.append(pick)
        seconds += step[pick]
        size += rows.bytes[k][pick]
    return choice, float(seconds), float(size)


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
    after = _priced(rows, price)
    remaining = np.append(np.cumsum([float(b.min()) for b in rows.bytes][::-1])[::-1], 0.0)
    limit = incumbent

    def kept(time: Array, size: Array, layer: int, strategy: int) -> NDArray[np.int64]:
        """Return the labels worth keeping, by bytes."""
        promise = time + after[layer][strategy] + price * (size - memory)
        open_labels = np.flatnonzero((size + remaining[layer + 1] <= memory) & (promise < limit))
        by_bytes = open_labels[np.lexsort((time[open_labels], size[open_labels]))]
        times = time[by_bytes]
        least = np.minimum.accumulate(np.concatenate([[np.inf], times[:-1]]))
        return by_bytes[times < least * (1 - 1e-13)]

    labels: list[list[tuple[Array, Array, NDArray[np.int64], NDArray[np.int64]]]] = []
    first = []
    for s in range(len(rows.seconds[0])):
        time, size = rows.seconds[0][s : s + 1], rows.bytes[0][s : s + 1]
        keep = kept(time, size, 0, s)
        nothing = np.zeros(len(keep), dtype=np.int64)
        first.append((time[keep], size[keep], nothing, nothing))
    labels.append(first)
    for k in range(1, len(rows.seconds)):
        before = labels[-1]
        counts = [len(label[0]) for label in before]
        times = np.concatenate([label[0] for label in before])
        sizes = np.concatenate([label[1] for label in before])
        origin = np.repeat(np.arange(len(before)), counts)
        place = np.concatenate([np.arange(count) for count in counts])
        row = []
        for s in range(len(rows.seconds[k])):
            time = times + rows.transitions[k][origin, s] + rows.seconds[k][s]
            size = sizes + rows.bytes[k][s]
            keep = kept(time, size, k, s)
            row.append((time[keep], size[keep], origin[keep], place[keep]))
        labels.append(row)
    ends = [
        (float(time[i]), s, i)
        for s, (time, _, _, _) in enumerate(labels[-1])
        for i in range(len(time))
    ]
    if not ends or min(ends)[0] >= limit:
        return None
    seconds, strategy, at = min(ends)
    choice = []
    for row in reversed(labels):
        choice.append(strategy)
        _, _, origins, places = row[strategy]
        strategy, at = int(origins[at]), int(places[at])
    return choice[::-1], seconds
