"""What an operator's table entry holds: its sharding rule and how it runs on local parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from attrs import field, frozen
from attrs.validators import in_, optional
from jax import Array, lax

from alpa_interchange import Factor, LogicalMesh, ShardingRule, Strategy
from alpa_meta import compat
from alpa_meta.compat import Atom, JaxprEqn, shape_of
from alpa_meta.types import Params

if TYPE_CHECKING:
    from alpa_meta.spmd.collectives import Collectives

Dim = tuple[str, ...]
"""Factors of one dim of a tensor, major first; the empty dim is never sharded."""


class Factors:
    """Names the factors of one operator and puts its rule together."""

    def __init__(self) -> None:
        self._factors: dict[str, Factor] = {}

    def new(
        self, size: int, kind: str = "parallel", *, reduction: str = "add", halo: int = 0
    ) -> Dim:
        """Return a dim made of one new factor; sizes 0 and 1 give the empty dim."""
        if size < 2:
            return ()
        number, name = len(self._factors), ""
        while not name or number >= 0:
            name = chr(ord("a") + number % 26) + name
            number = number // 26 - 1
        self._factors[name] = Factor(
            name=name, size=size, kind=kind, reduction=reduction, halo=halo
        )
        return (name,)

    def each(self, shape: Sequence[int]) -> list[Dim]:
        """Return one new parallel factor per dim of `shape`."""
        return [self.new(size) for size in shape]

    def rule(
        self, operands: Sequence[Sequence[Dim]], results: Sequence[Sequence[Dim]]
    ) -> ShardingRule:
        """Return the rule with these dims per operand and result."""
        used = {name for dims in (*operands, *results) for dim in dims for name in dim}
        return ShardingRule(
            factors=tuple(f for name, f in self._factors.items() if name in used),
            operands=tuple(map(tuple, operands)),
            results=tuple(map(tuple, results)),
        )


def operand_shapes(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Return the shape of every operand of `eqn`, literals included."""
    return [shape_of(atom) for atom in eqn.invars]


def result_shapes(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Return the shape of every result of `eqn`."""
    return [shape_of(var) for var in eqn.outvars]


@frozen
class LocalCall:
    """One operator on one device: local operands in, natural local results out.

    Natural means: before partial sums over sharded reduction factors are completed.
    """

    eqn: JaxprEqn
    operands: list[Array]
    rule: ShardingRule
    strategy: Strategy
    mesh: LogicalMesh
    collectives: Collectives

    def operand_axes(self, operand: int, dim: int) -> tuple[str, ...]:
        """Return the mesh axes that shard `dim` of `operand`."""
        return self._axes(self.rule.operands[operand][dim])

    def result_axes(self, result: int, dim: int) -> tuple[str, ...]:
        """Return the mesh axes that shard `dim` of the natural `result`."""
        return self._axes(self.rule.results[result][dim])

    def _axes(self, dim: Dim) -> tuple[str, ...]:
        return tuple(axis for name in dim for axis in self.strategy.axes(name))

    def shards(self, axes: tuple[str, ...]) -> int:
        """Return the number of devices along `axes`."""
        return self.mesh.size(axes)

    def index(self, axes: tuple[str, ...]) -> Array | np.int32:
        """Return this device's position along `axes`, the first the most significant."""
        return self.collectives.index(axes)

    def first(self, axes: tuple[str, ...], size: int) -> Array | np.int32:
        """Return the place in the whole dim of the first of this device's `size` elements."""
        return self.index(axes) * size

    def held(self, axes: tuple[str, ...], places: Array, size: int) -> tuple[Array, Array]:
        """Return where the elements at `places` of the whole dim are among this device's `size` of
        it, moved inside, and whether it has them."""
        local = places - jnp.asarray(self.first(axes, size), places.dtype)
        return jnp.clip(local, 0, size - 1), (local >= 0) & (local < size)

    def result_shape(self, result: int) -> tuple[int, ...]:
        """Return the local shape of the natural `result`."""
        return tuple(
            size // self.shards(self.result_axes(result, dim))
            for dim, size in enumerate(shape_of(self.eqn.outvars[result]))
        )

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """Return the local shape of `operand`."""
        return tuple(
            size // self.shards(self.operand_axes(operand, dim))
            for dim, size in enumerate(shape_of(self.eqn.invars[operand]))
        )

    def bind(self, operands: Sequence[Array] | None = None, **params: object) -> list[Array]:
        """Return the primitive applied to local `operands`, some of its `params` replaced."""
        values = self.operands if operands is None else list(operands)
        return compat.bind(self.eqn, values, {**self.eqn.params, **params} if params else None)

    def own_part(self, value: Array, result: int, dims: Sequence[int] | None = None) -> Array:
        """Return this device's part of a whole `value`, cut along `dims` as `result` is sharded."""
        for dim in range(value.ndim) if dims is None else dims:
            axes = self.result_axes(result, dim)
            if axes:
                value = self.collectives.part(value, axes, dim)
        return value


def run_unchanged(call: LocalCall) -> list[Array]:
    """Return the primitive applied to the local operands with its own parameters."""
    return call.bind()


def run_whole(call: LocalCall) -> list[Array]:
    """Return this device's parts of results computed whole: for operators that cannot be split."""
    return [call.own_part(value, k) for k, value in enumerate(call.bind())]


def run_identity(call: LocalCall) -> list[Array]:
    """Return the local operands as they are."""
    return list(call.operands)


def run_barrier(call: LocalCall) -> list[Array]:
    """Return the local operands behind an optimisation barrier."""
    return behind_barrier(call.operands)


def behind_barrier(values: Sequence[Array]) -> list[Array]:
    """Return `values` behind an optimisation barrier; keys of random generators pass by."""
    plain = [k for k, value in enumerate(values) if jnp.issubdtype(value.dtype, np.generic)]
    held = lax.optimization_barrier(tuple(jnp.asarray(values[k]) for k in plain))
    result = list(values)
    for k, value in zip(plain, held, strict=True):
        result[k] = value
    return result


def never(*_: object) -> bool:
    """Return False."""
    return False


def always(*_: object) -> bool:
    """Return True."""
    return True


Groups = tuple[tuple[int, ...], ...]
"""Groups of operands: multilinear in the groups, and linear in the operands of one together."""

FIRST: Groups = ((0,),)
"""Linear in the first operand, the others held."""


def jointly(eqn: JaxprEqn) -> Groups:
    """Return the group of all operands."""
    return (tuple(range(len(eqn.invars))),)


RuleFunction = Callable[[JaxprEqn], ShardingRule | None]
LocalFunction = Callable[[LocalCall], list[Array]]
CountFunction = Callable[[JaxprEqn], float]
ExchangeFunction = Callable[
    [JaxprEqn, Strategy, LogicalMesh], Iterable[tuple[str, float, tuple[str, ...]]]
]
PatchFunction = Callable[[JaxprEqn, ShardingRule, Strategy, LogicalMesh], float]
LIVENESS = ("stored", "written", "reduced", "gathered", "windows", "words", "fused", "alias")
KERNELS = ("matmul", "convolution", "elementwise")


@frozen
class Operator:
    """All that is known of one primitive.

    `rule` maps an equation to its sharding rule (None: it runs replicated), `local` runs it on the
    parts a strategy leaves on each device. `exchanges` yields the kind, the bytes per device and
    the mesh axes of the collectives inside an operator under a strategy, for the planner; None:
    what its rule says of permutation factors is enough.

    How results follow operands, beside what the factors of the rule say of the batch dim:

    linear_in    groups of operands it is multilinear in; jointly linear in those of one group
    linear       whether an unreduced sum may pass through it; None: it may if all its tensor
                 operands are of one group
    indices      the operands that say where others are read or written, but for dims taken whole;
                 None: it has none
    written      the operand that is written into the first, None: none is
    sums_survive whether the result of sums is the sum of the results in its types, where linear
    order_survives  whether a largest (smallest) operand gives the largest (smallest) result
    passes_on    whether result k is operand k
    in_blocks    whether its local form takes a part of a dim for a block of it, as one that counts
                 rows does
    layout       whether the result is the operand's elements at other places, or repeated
    steers       whether the result of all examples only says how long they are worked on, and what
                 each comes to does not depend on it

    What it costs, of the whole equation; None: derived from the factors of the rule, where those
    that several operands share and some result lacks are a contraction:

    flops        floating-point operations, a multiply-add two; contraction: twice the product of
                 all factors; else the elements of the results
    bytes        moved through memory; operands and results
    heavy        whether it chooses its strategy instead of following an operand; contraction: it
                 does
    kernel       what its seconds are fitted on, one of `KERNELS`; contraction: "matmul"
    patch_bytes  what its part under a strategy moves on a CPU beside that
    liveness     how its results hold memory, one of `LIVENESS`; see `intra_op.liveness`
    dear         whether XLA for CPUs computes it once, however many kernels read its result
    apart        whether it does so even for what reads its result beside others (pads, joins)
    piece_params its parameters on a piece of so many layers along dim 0; None: the same, if it runs
                 unchanged on parts
    reorders     whether what its "add" factors sum may be read from the other end
    causal       of an attention: its factors (rows, keys). A row reads the keys up to its own, and
                 `local` takes fewer rows than keys, which are the last ones; what results lack of
                 the rows is added up
    """

    rule: RuleFunction
    local: LocalFunction = run_unchanged
    linear: Callable[[JaxprEqn], bool] | None = None
    exchanges: ExchangeFunction | None = None
    linear_in: Groups | Callable[[JaxprEqn], Groups] = ()
    indices: Callable[[JaxprEqn], Sequence[int]] | None = None
    written: int | None = None
    sums_survive: Callable[[JaxprEqn], bool] = always
    order_survives: Callable[[JaxprEqn], bool] = never
    passes_on: bool = False
    in_blocks: bool = False
    layout: bool = False
    steers: bool = False
    flops: CountFunction | None = None
    bytes: CountFunction | None = None
    heavy: bool | None = None
    kernel: str | None = field(default=None, validator=optional(in_(KERNELS)))
    patch_bytes: PatchFunction | None = None
    liveness: str = field(default="stored", validator=in_(LIVENESS))
    dear: bool = False
    apart: bool = False
    piece_params: Callable[[JaxprEqn, int], dict[str, Array]] | None = None
    reorders: bool = False
    causal: tuple[str, str] | None = None

    def linear_groups(self, eqn: JaxprEqn) -> Groups:
        """Return the groups of operands that `eqn` is multilinear in."""
        return self.linear_in(eqn) if callable(self.linear_in) else self.linear_in

    def passes_sums(self, eqn: JaxprEqn) -> bool:
        """Return whether sums over the same axes in all tensor operands give one in the result."""
        if self.linear is not None:
            return self.linear(eqn)
        summed = {k for k, atom in enumerate(eqn.invars) if not isinstance(atom, compat.Literal)}
        return self.sums_survive(eqn) and any(
            summed <= set(group) and all(k in summed or _is_zero(eqn.invars[k]) for k in group)
            for group in self.linear_groups(eqn)
        )

    @property
    def runs_in_pieces(self) -> bool:
        """Return whether it may run on pieces of dim 0, its parameters adjusted."""
        return self.piece_params is not None or self.local in (run_unchanged, run_identity)


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, compat.Literal) and not np.any(atom.val)


def same_params(eqn: JaxprEqn, _: int) -> Params:
    """Return the parameters of an operator that runs on pieces of dim 0 as it is."""
    return dict(eqn.params)


def contracted(rule: ShardingRule) -> frozenset[str]:
    """Return the factors that several operands share and some result lacks: what is summed away."""
    readers = Counter(name for dims in rule.operands for name in _names(dims))
    kept = [_names(dims) for dims in rule.results]
    return frozenset(
        factor.name
        for factor in rule.factors
        if factor.kind in ("reduction", "replicate")
        and readers[factor.name] > 1
        and not all(factor.name in names for names in kept)
    )


def _names(dims: Sequence[Dim]) -> set[str]:
    return {name for dim in dims for name in dim}
