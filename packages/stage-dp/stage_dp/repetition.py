"""Repeated blocks of a program, found from the signatures of its ops alone.

A *run* is a stretch of ops that repeats with some period p: signature i equals signature i + p
along it. Blocks may begin anywhere within the period; the place is taken where the fewest bytes
cross from block to block, which for a residual network is the residual stream alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

MIN_SHARE = 0.01  # of all work: smaller blocks are not worth a layer,
MAIN_SHARE = 0.5  # unless together they are most of the program, as the blocks of 192 layers are
SAME_BYTES = 1.01  # live bytes within this factor count as equal


@frozen
class Run:
    """`count` blocks of `period` ops each, from op `start`."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    @property
    def cuts(self) -> range:
        """Return the op positions where blocks begin, and where the last ends."""
        return range(self.start, self.stop + 1, self.period)


def repeated_runs(
    signatures: Sequence[Hashable], work: NDArray[np.float64], live: NDArray[np.float64]
) -> tuple[Run, ...]:
    """Return disjoint runs of at least two blocks, first to last, those with most work chosen
    first.

    `work`: [ops], any unit. `live`: [ops + 1], bytes that cross a cut before each op.
    """
    number: dict[Hashable, int] = {}
    codes = np.array([number.setdefault(s, len(number)) for s in signatures], dtype=np.int64)
    total = np.concatenate([[0.0], np.cumsum(work)])
    if not len(codes) or total[-1] <= 0:
        return ()
    found: list[Run] = []
    open_ranges = [(0, len(codes))]
    while open_ranges:
        start, stop = open_ranges.pop()
        run = _largest(codes, total, live, start, stop)
        if run is not None:
            found.append(run)
            open_ranges += [(start, run.start), (run.stop, stop)]
    return tuple(sorted(found, key=lambda run: run.start))


def _largest(
    codes: NDArray[np.int64],
    total: NDArray[np.float64],
    live: NDArray[np.float64],
    start: int,
    stop: int,
) -> Run | None:
    """Return the run in start..stop whose whole blocks hold the most work; ties: shorter period."""
    best: tuple[float, int, int, int] | None = None  # work, -period, first op, ops
    for period in range(1, (stop - start) // 2 + 1):
        same = codes[start : stop - period] == codes[start + period : stop]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], same.view(np.int8), [0]])))
        for first, last in zip(
            (edges[::2] + start).tolist(), (edges[1::2] + start).tolist(), strict=True
        ):
            length = last - first + period
            if length < 2 * period:
                continue
            # Whichever whole blocks are taken, they hold the same work up to rounding.
            held = total[first + length // period * period] - total[first]
            if held < min(MIN_SHARE * (length // period), MAIN_SHARE) * total[-1]:
                continue
            key = (round(held / total[-1], 9), -period, first, length)
            if best is None or key[:2] > best[:2]:
                best = key
    if best is None:
        return None
    _, negative, first, length = best
    return _aligned(total, live, first, length, -negative)


def _aligned(
    total: NDArray[np.float64], live: NDArray[np.float64], first: int, length: int, period: int
) -> Run | None:
    """Return the run with the offset where the fewest bytes cross its inner cuts.

    Among offsets with (nearly) the fewest bytes: most blocks, then the one that leaves the rest of
    the run on one side, where it makes a nearly whole block.
    """
    options = []
    for offset in range(period):
        count = (length - offset) // period
        if count < 2:
            continue
        run = Run(first + offset, period, count)
        inner = np.array(run.cuts)[1:-1]
        left = total[run.start] - total[first]
        right = total[first + length] - total[run.stop]
        options.append((float(np.median(live[inner])), count, max(left, right), run))
    least = min(option[0] for option in options)
    near = [option for option in options if option[0] <= least * SAME_BYTES]
    return max(near, key=lambda option: (option[1], option[2], -option[3].start))[3]
