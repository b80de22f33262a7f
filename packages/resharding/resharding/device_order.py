"""How the pieces of a tile are concatenated, one dim after another."""

from __future__ import annotations

from typing import TypeAlias

from resharding.slices import Box

# A piece by its number, or (dim, parts to concatenate along it).
Order: TypeAlias = "int | tuple[int, tuple[Order, ...]]"


def join_order(tile: Box, boxes: tuple[Box, ...]) -> Order:
    """Return how to concatenate disjoint `boxes` into `tile`: nested along one dim at a time.

    Plans cut tiles along the borders of other tiles, which go all the way through, and parts of
    slices along one dim: such boxes always come apart at a border that cuts none of them.
    """
    return _joined(tile, [(number, box) for number, box in enumerate(boxes)])


def _joined(tile: Box, boxes: list[tuple[int, Box]]) -> Order:
    if len(boxes) <= 1:
        return boxes[0][0] if boxes else 0
    for dim in range(len(tile.start)):
        edges = {box.start[dim] for _, box in boxes} - {tile.start[dim]}
        through = [
            edge
            for edge in sorted(edges)
            if all(box.stop[dim] <= edge or box.start[dim] >= edge for _, box in boxes)
        ]
        if not through:
            continue
        bounds = [tile.start[dim], *through, tile.stop[dim]]
        parts = []
        for begin, end in zip(bounds, bounds[1:], strict=False):
            inside = [each for each in boxes if begin <= each[1].start[dim] < end]
            start = (*tile.start[:dim], begin, *tile.start[dim + 1 :])
            stop = (*tile.stop[:dim], end, *tile.stop[dim + 1 :])
            parts.append(_joined(Box(start, stop), inside))
        return dim, tuple(parts)
    raise ValueError(
        f"the {len(boxes)} pieces of the tile {tile.start}..{tile.stop} interlock, so they cannot "
        "be concatenated along one dim after another; use a plan by resharding.plan"
    )
