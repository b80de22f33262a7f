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
from resharding.device_order import Order, join_order
from resharding.slices import Box, device_tiles
from resharding.traffic import boxes_moved, gathered_pieces

# XLA for CPUs ends the process ("Check failed: bit_offset") when it compiles their concatenation.
_WIDENED = (jnp.int2, jnp.uint2)

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
        self._rounds: list[list[_Move]] = []  # moves, those first whose pieces are there first
        self._round_after: dict[tuple[int, Box], int] = {}
        self._parts: dict[int, dict[Box, None]] = {device: {} for device in self.target_tiles}
        self._cuts: dict[int, dict[Box, None]] = {device: {} for device in self.source_tiles}
        for transfer, boxes in zip(plan.transfers, boxes_moved(plan), strict=True):
            box = Box(transfer.start, transfer.stop)
            if transfer.method == "local":
                self._cuts[transfer.sender][box] = None
                self._parts[transfer.sender][box] = None
            elif transfer.method == "gather":
                for owner, piece in gathered_pieces(plan.transfers, transfer):
                    others = [device for device in transfer.receivers if device != owner]
                    self._spread(piece, owner, others)
            else:
                for piece in boxes:
                    self._spread(piece, transfer.sender, transfer.receivers)
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
            feeder = chain[k - (1 << (k.bit_length() - 1))]
            number = self._round_after.get((feeder, box), 0)
            self._round_after[chain[k], box] = number + 1
            self._rounds += [[] for _ in range(number + 1 - len(self._rounds))]
            self._rounds[number].append(_Move(box, feeder, chain[k]))
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
        for moves in self._rounds:  # one call each: the calls cost as much as small copies
            pieces = [held[move.sender, move.box] for move in moves]
            moved = jax.device_put(pieces, [devices[move.receiver] for move in moves])
            held.update(((m.receiver, m.box), piece) for m, piece in zip(moves, moved, strict=True))
        results = []
        for device, (parts_here, order) in self._joins.items():
            pieces = tuple(held[device, box] for box in parts_here)
            if not pieces:  # a tile without elements
                shape, dtype = self.target_tiles[device].shape, next(iter(shards.values())).dtype
                results.append(jax.device_put(jnp.zeros(shape, dtype), devices[device]))
            else:
                results.append(pieces[0] if isinstance(order, int) else join(pieces, order))
        return results


@functools.partial(jax.jit, static_argnums=1)
def _cut(tile: jax.Array, corners: tuple[Corners, ...]) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.slice(tile, start, stop) for start, stop in corners)


@functools.partial(jax.jit, static_argnums=1)
def join(pieces: tuple[jax.Array, ...], order: Order) -> jax.Array:
    dtype = pieces[0].dtype
    if dtype not in _WIDENED:
        return _joined(pieces, order)
    return _joined(tuple(piece.astype(jnp.int8) for piece in pieces), order).astype(dtype)


def _joined(pieces: tuple[jax.Array, ...], order: Order) -> jax.Array:
    if isinstance(order, int):
        return pieces[order]
    dim, parts = order
    return jax.lax.concatenate([_joined(pieces, part) for part in parts], dim)


def _corners(box: Box, tile: Box) -> Corners:
    start = tuple(a - base for a, base in zip(box.start, tile.start, strict=True))
    stop = tuple(a - base for a, base in zip(box.stop, tile.start, strict=True))
    return start, stop
