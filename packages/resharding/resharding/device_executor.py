"""Carries out a plan on the devices of one process, without the memory of the host.

Each source device cuts what it sends out of its tile in one jitted program, pieces go from device
to device, and each target device joins what arrived in another. Nothing waits: all calls only
enqueue work, so a reshard runs beside other programs of the devices. A piece for n receivers goes
through a binomial tree, in log2(n + 1) steps.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from attrs import frozen

from alpa_interchange.reshard import ReshardingPlan
from resharding.coverage import check_plan
from resharding.slices import Box, device_tiles
from resharding.traffic import gathered_pieces

Corners: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # start and stop, in a tile


@frozen
class _Move:
    """`box` goes from device to device."""

    box: Box
    sender: int
    receiver: int


class DeviceExecutor:
    """Executes every transfer of `plan`; the plan is checked once, when this is made."""

    def __init__(self, plan: ReshardingPlan) -> None:
        check_plan(plan)
        shape = plan.task.tensor.shape
        self.source_tiles = device_tiles(plan.task.source, shape, "source")
        self.target_tiles = device_tiles(plan.task.target, shape, "target")
        self._moves: list[_Move] = []
        self._parts: dict[int, dict[Box, None]] = {device: {} for device in self.target_tiles}
        self._cuts: dict[int, dict[Box, None]] = {device: {} for device in self.source_tiles}
        for transfer in plan.transfers:
            box = Box(transfer.start, transfer.stop)
            if transfer.method == "local":
                self._cuts[transfer.sender][box] = None
                self._parts[transfer.sender][box] = None
            elif transfer.method == "gather":
                for owner, piece in gathered_pieces(plan.transfers, transfer):
                    others = [device for device in transfer.receivers if device != owner]
                    self._spread(piece, owner, others)
            else:
                self._spread(box, transfer.sender, transfer.receivers)
        self._joins = {
            device: (tuple(parts), join_order(self.target_tiles[device], tuple(parts)))
            for device, parts in self._parts.items()
        }

    def _spread(self, box: Box, sender: int, receivers: Sequence[int]) -> None:
        """Plan the copies of one piece: the k-th holder feeds the one that is a power of 2 on."""
        chain = (sender, *receivers)
        if box not in self._parts.get(sender, {}):
            self._cuts[sender][box] = None
        for k in range(1, len(chain)):
            self._moves.append(_Move(box, chain[k - (1 << (k.bit_length() - 1))], chain[k]))
            self._parts[chain[k]][box] = None

    def run(self, shards: Mapping[int, jax.Array], devices: Mapping[int, Any]) -> list[jax.Array]:
        """Return the tile of every target device in the order of `target_tiles`, on its device.

        `shards` are the tiles of the source devices, `devices` the jax devices by number.
        """
        held: dict[tuple[int, Box], jax.Array] = {}
        for device, boxes in self._cuts.items():
            tile = self.source_tiles[device]
            whole = [box for box in boxes if box == tile]
            held.update({(device, box): shards[device] for box in whole})
            parts = [box for box in boxes if box != tile]
            if parts:
                corners = tuple(_corners(box, tile) for box in parts)
                pieces = _cut(shards[device], corners)
                held.update(zip(((device, box) for box in parts), pieces, strict=True))
        for move in self._moves:
            piece = held[move.sender, move.box]
            held[move.receiver, move.box] = jax.device_put(piece, devices[move.receiver])
        results = []
        for device, (parts_here, order) in self._joins.items():
            pieces = tuple(held[device, box] for box in parts_here)
            if not pieces:  # a tile without elements
                shape, dtype = self.target_tiles[device].shape, next(iter(shards.values())).dtype
                results.append(jax.device_put(jnp.zeros(shape, dtype), devices[device]))
            else:
                results.append(pieces[0] if isinstance(order, int) else _join(pieces, order))
        return results


@functools.partial(jax.jit, static_argnums=1)
def _cut(tile: jax.Array, corners: tuple[Corners, ...]) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.slice(tile, start, stop) for start, stop in corners)


# A piece by its number, or (dim, parts to concatenate along it).
Order: TypeAlias = "int | tuple[int, tuple[Order, ...]]"


@functools.partial(jax.jit, static_argnums=1)
def _join(pieces: tuple[jax.Array, ...], order: Order) -> jax.Array:
    if isinstance(order, int):
        return pieces[order]
    dim, parts = order
    return jax.lax.concatenate([_join(pieces, part) for part in parts], dim)


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


def _corners(box: Box, tile: Box) -> Corners:
    start = tuple(a - base for a, base in zip(box.start, tile.start, strict=True))
    stop = tuple(a - base for a, base in zip(box.stop, tile.start, strict=True))
    return start, stop
