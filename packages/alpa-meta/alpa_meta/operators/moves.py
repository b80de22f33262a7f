"""Elements moved between devices along one sharded dim, as cutting and joining along it needs.

A run is a stretch of an operand that becomes a stretch of the result. Cut where parts end, runs
fall into pieces that each go from one device to one device. Pieces whose senders differ and whose
receivers differ travel together in one collective-permute, a round:

    4 devices, the first half of a dim:      result part   0   1 | 2   3
                                             read from     0   0 | 1   1    two rounds: {0->1, 1->2}
                                                                            and {1->3}; 0->0 stays
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import jax.numpy as jnp
from attrs import frozen
from jax import Array, lax
from jax.typing import ArrayLike

from alpa_meta.operators.operator import LocalCall

_MOST_ROUNDS = 16  # beyond, one all-gather waits less often than so many permutes


@frozen
class Run:
    """Elements [start, start + length) of `operand` along a dim, at `target` of the result."""

    operand: int
    start: int
    length: int
    target: int


@frozen
class Piece:
    """Elements that `sender` has from `start` on and `receiver` needs from `target` on.

    `start` counts in the sender's parts of the operands joined, `target` in the receiver's part.
    """

    sender: int
    start: int
    length: int
    receiver: int
    target: int


@lru_cache(maxsize=4096)
def pieces(
    runs: tuple[Run, ...], sizes: tuple[int, ...], size: int, count: int
) -> tuple[Piece, ...]:
    """Return the pieces of `runs` from operands of `sizes` to a result of `size`, all in `count`
    parts."""
    found = []
    offsets = [sum(sizes[:k]) // count for k in range(len(sizes))]
    wide = size // count
    for run in runs:
        part = sizes[run.operand] // count
        for receiver in range(run.target // wide, count):
            here = max(run.target, receiver * wide)
            stop = min(run.target + run.length, (receiver + 1) * wide)
            while here < stop:
                source = run.start + here - run.target
                sender, inside = divmod(source, part)
                length = min(stop - here, part - inside)
                start, target = offsets[run.operand] + inside, here - receiver * wide
                found.append(Piece(sender, start, length, receiver, target))
                here += length
    return tuple(found)


def reversal(size: int, count: int) -> tuple[Piece, ...]:
    """Return the pieces that put `count` parts, each reversed already, in reverse order."""
    return tuple(Piece(k, 0, size // count, count - 1 - k, 0) for k in range(count))


@lru_cache(maxsize=4096)
def rounds(moved: tuple[Piece, ...]) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces in rounds of different senders and receivers; those that stay apart."""
    found: list[list[Piece]] = []
    for piece in moved:
        for group in found:
            stays = group[0].sender == group[0].receiver
            if stays == (piece.sender == piece.receiver) and all(
                piece.sender != other.sender and piece.receiver != other.receiver for other in group
            ):
                group.append(piece)
                break
        else:
            found.append([piece])
    return tuple(map(tuple, found))


def exchanges(moved: tuple[Piece, ...], parts: int, count: int) -> list[tuple[str, int]]:
    """Return kind and elements of each collective; a device holds `parts` of them to begin with."""
    sent = [group for group in rounds(moved) if group[0].sender != group[0].receiver]
    if len(sent) > _MOST_ROUNDS:
        return [("all-gather", parts * count)]
    return [("collective-permute", max(piece.length for piece in group)) for group in sent]


def move(
    call: LocalCall,
    values: Sequence[Array],
    axes: tuple[str, ...],
    dim: int,
    moved: tuple[Piece, ...],
    size: int,
    filler: ArrayLike = 0,
) -> Array:
    """Return this device's result, of `size` elements along `dim`, made of pieces of the devices'
    `values`; elements that no piece brings are `filler`."""
    source = lax.concatenate(list(values), dim) if len(values) > 1 else values[0]
    count, held = call.shards(axes), source.shape[dim]
    if [kind for kind, _ in exchanges(moved, held, count)] == ["all-gather"]:
        source = call.collectives.all_gather(source, axes, dim, "pieces from many devices")
        moved = tuple(
            Piece(p.receiver, p.sender * held + p.start, p.length, p.receiver, p.target)
            for p in moved
        )
        held *= count
    shape = (*source.shape[:dim], size, *source.shape[dim + 1 :])
    result = jnp.full(shape, filler, source.dtype)
    place = lax.broadcasted_iota(jnp.int32, shape, dim)
    for group in rounds(moved):
        length = max(piece.length for piece in group)
        starts = {p.sender: min(p.start, held - length) for p in group}
        value = _cut(source, _here(call, axes, starts), length, dim)
        if group[0].sender != group[0].receiver:
            pairs = [(piece.sender, piece.receiver) for piece in group]
            value = call.collectives.permute(value, axes, pairs, "pieces of a dim")
        offsets = {p.receiver: p.target - p.start + starts[p.sender] for p in group}
        # zeros around, so that any place of the result has an element to read
        value = lax.pad(
            value,
            jnp.zeros((), value.dtype),
            [(size, size, 0) if d == dim else (0, 0, 0) for d in range(value.ndim)],
        )
        value = _cut(value, size - _here(call, axes, offsets), size, dim)
        first = _here(call, axes, {p.receiver: p.target for p in group}, size)
        stop = _here(call, axes, {p.receiver: p.target + p.length for p in group}, 0)
        result = jnp.where((place >= first) & (place < stop), value, result)
    return result


def _here(
    call: LocalCall, axes: tuple[str, ...], numbers: dict[int, int], otherwise: int | None = None
) -> Array | int:
    """Return this device's entry of `numbers`; a plain int where all devices have the same.

    Devices without an entry have `otherwise`; None: any number will do.
    """
    rest = next(iter(numbers.values())) if otherwise is None else otherwise
    table = [numbers.get(device, rest) for device in range(call.shards(axes))]
    if len(set(table)) == 1:
        return table[0]
    return jnp.asarray(table, jnp.int32)[call.index(axes)]


def _cut(value: Array, start: Array | int, size: int, dim: int) -> Array:
    if isinstance(start, int):
        return lax.slice_in_dim(value, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(value, start, size, dim)
