"""Values in the memory of arrays that a program copied before it writes over them.

A program that replaces its arguments copies those that it reads for more than their update. From
then until the update nothing is in their place, and XLA assigns it, as any other buffer, to values
that fit and live meanwhile: the largest first, each to the smallest place (`BufferAssigner`). So
the copy of an array mostly lies where the array copied before it lay.           -> spans_outside()

What fits is judged by whole arrays: how they are cut over devices is not known here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from attrs import frozen

from alpa_meta.intra_op.held_values import KINDS, Span


@frozen
class Place:
    """The memory of an array, free over the half-open time [start, stop)."""

    bytes: float
    start: int
    stop: int


def spans_outside(spans: Sequence[Span], places: Sequence[Place]) -> list[Span]:
    """Return the spans that no place has room for, in their order.

    A gradient is in its place until the update has read it, which writes over it.
    """
    ordered = sorted(places, key=lambda place: place.bytes)
    sizes = [place.bytes for place in ordered]
    starts: list[list[int]] = [[] for _ in ordered]  # of the spans in each place, ascending
    stops: list[list[int]] = [[] for _ in ordered]
    inside = set[Span]()
    for span in sorted(spans, key=lambda one: (-one.count * one.source.bytes, one.start)):
        last = int(span.kind == KINDS.index("gradients"))
        for number in range(bisect_left(sizes, span.count * span.source.bytes), len(ordered)):
            place = ordered[number]
            if span.start < place.start or span.stop > place.stop + last:
                continue
            after = bisect_right(starts[number], span.start)
            if after and stops[number][after - 1] > span.start:
                continue
            if after < len(starts[number]) and starts[number][after] < span.stop:
                continue
            starts[number].insert(after, span.start)
            stops[number].insert(after, span.stop)
            inside.add(span)
            break
    return [span for span in spans if span not in inside]
