"""Independent small collectives of a program sent as one: one buffer, one rendezvous.

XLA's combiners do this on GPUs for all-reduces, all-gathers and reduce-scatters. On host devices
they merge only all-reduces, and into one with many operands, each of which waits for all devices
anew. Here the tensors of a bucket are laid side by side in one buffer instead, which pays as long
as they are small: a copy then costs less than a rendezvous (`HOST_BUCKETS`).

A program is traced, its collectives are put into buckets, and it is run again bucket by bucket:

    same bucket     same kind, mesh axes and dtype; neither depends on the other,
                    not even through other buckets; total bytes within the limit    -> _Buckets
    order           as in the program, a bucket as late as its last member          -> _schedule()
    one buffer      [n, bytes of one device]: row i is what device i gives or gets  -> _SENDERS

Sums are those of the single collectives, element by element.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.extend.core as jex
import jax.extend.source_info_util as source_info_util
import jax.numpy as jnp
from attrs import define, field, frozen
from jax import Array, lax

from alpa_meta import compat
from alpa_meta.compat import Atom, Jaxpr, JaxprEqn, Var, array_type, dtype_of
from alpa_meta.operators.collective import REDUCE, Collective, collective_of
from alpa_meta.spmd.collectives import scopes_of
from alpa_meta.types import Function


@frozen(kw_only=True)
class BucketLimits:
    """The largest tensor that goes into a bucket, and the largest bucket, in bytes per device."""

    tensor: float
    bucket: float


HOST_BUCKETS = BucketLimits(tensor=64 * 1024.0, bucket=4 * 1024.0 * 1024.0)
"""On host devices. A rule of thumb: beyond this, copying into the buffer outweighs a rendezvous."""

_RECENT = 8  # buckets of a kind that are looked at for a place


def in_buckets(
    function: Function[Sequence[Array]], limits: BucketLimits | None
) -> Function[list[Array]]:
    """Return `function` of arrays with its collectives in buckets; None: as they are.

    To be called inside shard_map.
    """

    def run(*values: Array) -> list[Array]:
        if limits is None:
            return list(function(*values))
        closed = jax.make_jaxpr(function)(*values)
        jaxpr = compat.open_jaxpr(closed)
        if any(type(effect).__name__ != "NamedAxisEffect" for effect in jaxpr.effects):
            return list(jex.jaxpr_as_fun(closed)(*values))  # callbacks keep their order
        return _run(jaxpr, compat.consts(closed), values, limits)

    return run


@frozen(eq=False)
class _Sent:
    """A collective that may share a buffer, over `num_devices`; the larger side's bytes."""

    of: Collective
    num_devices: int
    bytes: float

    def fits(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        return self.of.kind, self.of.axes, dtype_of(eqn.invars[0])


def _sent(eqn: JaxprEqn) -> _Sent | None:
    """Return what an equation sends, None if it is nothing that can share a buffer."""
    found = collective_of(eqn)
    if found is None or isinstance(eqn.invars[0], compat.Literal):
        return None
    aval = array_type(eqn.invars[0])
    if not hasattr(aval.dtype, "itemsize"):
        return None
    count = math.prod(lax.axis_size(axis) for axis in found.axes)
    size = float(max(aval.size, array_type(eqn.outvars[0]).size) * aval.dtype.itemsize)
    return _Sent(found, count, size)


@define(eq=False)
class _Bucket:
    """Equations that send together; `needs` are the buckets they wait for, as bits."""

    members: list[int] = field(factory=list)
    sent: list[_Sent] = field(factory=list)
    bytes: float = 0.0
    needs: int = 0


class _Buckets:
    """Puts collectives into buckets, in program order, the latest bucket with a place first."""

    def __init__(self, limits: BucketLimits) -> None:
        self.limits = limits
        self.all: list[_Bucket] = []
        self._recent: dict[tuple[Hashable, ...], list[int]] = {}

    def place(self, position: int, sent: _Sent, fits: tuple[Hashable, ...], needs: int) -> int:
        """Return the number of the bucket that takes equation `position`."""
        recent = self._recent.setdefault(fits, [])
        small = sent.bytes <= self.limits.tensor
        for number in reversed(recent[-_RECENT:]) if small else ():
            bucket = self.all[number]
            room = bucket.bytes + sent.bytes <= self.limits.bucket
            if room and not self._waits(needs, number):
                break
        else:
            number, bucket = len(self.all), _Bucket()
            self.all.append(bucket)
            if small:
                recent.append(number)
        bucket.members.append(position)
        bucket.sent.append(sent)
        bucket.bytes += sent.bytes
        bucket.needs |= needs
        return number

    def _waits(self, needs: int, number: int) -> bool:
        """Return whether what waits for the buckets `needs` waits for bucket `number`."""
        seen, left = 0, needs
        while left:
            if left >> number & 1:
                return True
            seen |= left
            reached = 0
            while left:
                lowest = left & -left
                reached |= self.all[lowest.bit_length() - 1].needs
                left ^= lowest
            left = reached & ~seen
        return False


def _run(
    jaxpr: Jaxpr, consts: Sequence[Array], values: Sequence[Array], limits: BucketLimits
) -> list[Array]:
    """Return the outputs of `jaxpr`, its collectives in buckets."""
    steps = _schedule(jaxpr, limits)
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))

    def read(atom: Atom) -> Array:
        return atom.val if isinstance(atom, compat.Literal) else known[atom]

    for bucket in steps:
        eqns = [jaxpr.eqns[position] for position in bucket.members]
        info = eqns[0].source_info
        stack = source_info_util.current_name_stack() + info.name_stack
        with source_info_util.user_context(info.traceback, name_stack=stack):
            if len(eqns) == 1:
                (eqn,) = eqns
                known.update(
                    zip(eqn.outvars, compat.bind(eqn, list(map(read, eqn.invars))), strict=True)
                )
            else:
                send = _SENDERS[bucket.sent[0].of.kind]
                with jax.named_scope("+".join(name for eqn in eqns for name in scopes_of(eqn))):
                    results = send(bucket.sent, [read(eqn.invars[0]) for eqn in eqns])
                known.update(zip((eqn.outvars[0] for eqn in eqns), results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _schedule(jaxpr: Jaxpr, limits: BucketLimits) -> list[_Bucket]:
    """Return the equations that matter in an order that has collectives of a bucket together."""
    needed = _needed(jaxpr)
    buckets = _Buckets(limits)
    steps: list[_Bucket] = []
    step_of: dict[int, int] = {}  # bucket -> step
    waits_for: dict[Var, int] = {}  # variable -> buckets it waits for directly, as bits
    maker: dict[Var, int] = {}  # variable -> step
    for position in needed:
        eqn = jaxpr.eqns[position]
        read = [atom for atom in eqn.invars if not isinstance(atom, compat.Literal)]
        needs = 0
        for atom in read:
            needs |= waits_for.get(atom, 0)
        sent = _sent(eqn)
        if sent is None:
            step = len(steps)
            steps.append(_Bucket([position]))
        else:
            number = buckets.place(position, sent, sent.fits(eqn), needs)
            needs = 1 << number
            step = step_of.setdefault(number, len(steps))
            if step == len(steps):
                steps.append(buckets.all[number])
        for var in eqn.outvars:
            maker[var] = step
            if needs:
                waits_for[var] = needs
    return _ordered(jaxpr, steps, maker)


def _needed(jaxpr: Jaxpr) -> list[int]:
    """Return the positions of the equations that outputs depend on."""
    wanted = {atom for atom in jaxpr.outvars if not isinstance(atom, compat.Literal)}
    found = []
    for position in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[position]
        if any(var in wanted for var in eqn.outvars):
            found.append(position)
            wanted.update(a for a in eqn.invars if not isinstance(a, compat.Literal))
    return found[::-1]


def _ordered(jaxpr: Jaxpr, steps: Sequence[_Bucket], maker: dict[Var, int]) -> list[_Bucket]:
    """Return `steps` in an order in which each comes after what it reads."""
    readers: list[list[int]] = [[] for _ in steps]
    missing = [0] * len(steps)
    for number, step in enumerate(steps):
        before = {
            maker[atom]
            for position in step.members
            for atom in jaxpr.eqns[position].invars
            if not isinstance(atom, compat.Literal) and atom in maker
        }
        missing[number] = len(before)
        for one in before:
            readers[one].append(number)
    ready = [(step.members[-1], k) for k, step in enumerate(steps) if not missing[k]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, number = heapq.heappop(ready)
        found.append(steps[number])
        for reader in readers[number]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (steps[reader].members[-1], reader))
    return found


def _reduce(sent: Sequence[_Sent], values: Sequence[Array]) -> list[Array]:
    reduced: Callable[[Array, tuple[str, ...]], Array] = REDUCE[sent[0].of.kind]
    total = reduced(jnp.concatenate([jnp.ravel(value) for value in values]), sent[0].of.axes)
    pieces = _cut(total, [value.size for value in values])
    return [jnp.reshape(p, v.shape) for p, v in zip(pieces, values, strict=True)]


def _gather(sent: Sequence[_Sent], values: Sequence[Array]) -> list[Array]:
    mine = jnp.concatenate([jnp.ravel(value) for value in values])
    rows = lax.all_gather(mine, sent[0].of.axes)
    pieces = _cut(rows, [value.size for value in values])
    return [
        _joined(jnp.reshape(piece, (one.num_devices, *value.shape)), one.of.dim)
        for one, value, piece in zip(sent, values, pieces, strict=True)
    ]


def _scatter(sent: Sequence[_Sent], values: Sequence[Array]) -> list[Array]:
    parts = [_parted(value, one.of.dim, one.num_devices) for one, value in zip(sent, values)]
    rows = jnp.concatenate([jnp.reshape(p, (p.shape[0], -1)) for p in parts], axis=1)
    mine = lax.psum_scatter(rows, sent[0].of.axes, scatter_dimension=0, tiled=False)
    pieces = _cut(mine, [part.size // part.shape[0] for part in parts])
    return [jnp.reshape(piece, p.shape[1:]) for p, piece in zip(parts, pieces, strict=True)]


def _exchange(sent: Sequence[_Sent], values: Sequence[Array]) -> list[Array]:
    parts = [_parted(value, one.of.dim, one.num_devices) for one, value in zip(sent, values)]
    rows = jnp.concatenate([jnp.reshape(p, (p.shape[0], -1)) for p in parts], axis=1)
    got = lax.all_to_all(rows, sent[0].of.axes, split_axis=0, concat_axis=0, tiled=True)
    pieces = _cut(got, [part.size // part.shape[0] for part in parts])
    return [
        _joined(jnp.reshape(piece, part.shape), one.of.to_dim)
        for one, part, piece in zip(sent, parts, pieces, strict=True)
    ]


def _parted(value: Array, dim: int, count: int) -> Array:
    """Return `value` cut along `dim` into `count` parts: [count, part]."""
    shape = value.shape
    cut = jnp.reshape(value, (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]))
    return jnp.moveaxis(cut, dim, 0)


def _joined(parts: Array, dim: int) -> Array:
    """Return `parts` [count, part] joined along `dim` of a part."""
    count, *shape = parts.shape
    shape[dim] *= count
    return jnp.reshape(jnp.moveaxis(parts, 0, dim), shape)


def _cut(buffer: Array, sizes: Sequence[int]) -> list[Array]:
    """Return consecutive pieces of the last dim."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(lax.slice_in_dim(buffer, start, start + size, axis=-1))
        start += size
    return pieces


_SENDERS: dict[str, Callable[[Sequence[_Sent], Sequence[Array]], list[Array]]] = {
    **dict.fromkeys(REDUCE, _reduce),
    "all-gather": _gather,
    "reduce-scatter": _scatter,
    "all-to-all": _exchange,
}
