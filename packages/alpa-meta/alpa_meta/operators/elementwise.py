"""Operators that act on each element alone, and the test that recognises unknown ones."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

from alpa_interchange import ShardingRule
from alpa_meta import compat
from alpa_meta.compat import JaxprEqn, dtype_of, shape_of
from alpa_meta.operators.operator import (
    FIRST,
    Factors,
    Groups,
    Operator,
    always,
    jointly,
    never,
    operand_shapes,
    result_shapes,
    run_barrier,
    run_identity,
)
from alpa_meta.operators.work import nothing, result_bytes, result_elements
from alpa_meta.program_caches import cached_by_program

_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc
    exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to
    lgamma log log1p log2 logistic lt lt_to max min mul ne neg nextafter not one_minus_square or
    polygamma polynomial population_count pow real reduce_precision regularized_incomplete_beta rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh threefry2x32 xor zeta
    random_seed random_fold_in random_clone
""".split()

_DEAR = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh div erf erf_inv erfc exp exp2 expm1 log
    log1p log2 logistic pow rem rsqrt sin sinh sqrt tan tanh
    """.split()
)  # InstructionFusion::IsExpensive (xla/service/instruction_fusion.cc)

_IDENTITIES = """
    name device_put sharding_constraint mesh_cast reshard pvary layout_constraint alpa_pin alpa_read
    alpa_gradient
""".split()

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def elementwise_rule(eqn: JaxprEqn) -> ShardingRule | None:
    """Return the rule of an operator whose operands have the result's shape or broadcast to it.

    A scalar operand applies to every element; a dim of size one stretches along the result's.
    None when shapes do not fit this pattern.
    """
    shape = result_shapes(eqn)[0]
    if any(other != shape for other in result_shapes(eqn)):
        return None
    factors = Factors()
    dims = factors.each(shape)
    operands = []
    for operand in operand_shapes(eqn):
        if len(operand) not in (0, len(shape)):
            return None
        if any(size not in (1, whole) for size, whole in zip(operand, shape)):
            return None
        operands.append(
            [dim if size == whole else () for dim, size, whole in zip(dims, operand, shape)]
        )
    return factors.rule(operands, [dims] * len(eqn.outvars))


def _each_alone(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of an operator that maps operand k to result k, of any shapes."""
    factors = Factors()
    dims = [factors.each(shape) for shape in operand_shapes(eqn)]
    return factors.rule(dims, dims)


def _widens(eqn: JaxprEqn) -> bool:
    """Return whether a conversion of floats loses nothing of the parts of an unreduced sum."""
    source, target = str(dtype_of(eqn.invars[0])), str(dtype_of(eqn.outvars[0]))
    if source not in _FLOATS or target not in _FLOATS:
        return False
    wider = jax.numpy.promote_types(source, target) == np.dtype(target)
    return bool(wider)


def _chosen(eqn: JaxprEqn) -> Groups:
    """Return the group of the cases that a selection chooses from."""
    return (tuple(range(1, len(eqn.invars))),)


def _conversion_adds_up(eqn: JaxprEqn) -> bool:
    """Return whether converted parts of a sum add up to the converted sum: not if they are floored,
    nor as truth values."""
    source, target = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
    floored = jnp.issubdtype(source, jnp.inexact) and jnp.issubdtype(target, jnp.integer)
    return target != np.bool_ and not floored


def _conversion_keeps_order(eqn: JaxprEqn) -> bool:
    """Return whether the largest stays the largest, and the smallest the smallest, if converted."""
    source, target = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
    if np.bool_ in (source, target):
        return bool(source == np.bool_)
    signs_lost = jnp.issubdtype(target, jnp.unsignedinteger)
    return not signs_lost or bool(jnp.issubdtype(source, jnp.unsignedinteger))


def _divides_exactly(eqn: JaxprEqn) -> bool:
    return bool(jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.inexact))


_each = functools.partial(
    Operator,
    elementwise_rule,
    flops=result_elements,
    bytes=result_bytes,
    heavy=False,
    liveness="fused",
)
_picked = functools.partial(_each, flops=nothing)
_alias = functools.partial(
    _each, flops=nothing, bytes=nothing, liveness="alias", order_survives=always
)
_passed_on = functools.partial(
    Operator,
    _each_alone,
    flops=nothing,
    bytes=nothing,
    heavy=False,
    liveness="alias",
    linear_in=jointly,
    passes_on=True,
)

OPERATORS = {
    **{name: _each(dear=name in _DEAR) for name in _NAMES},
    "neg": _each(linear_in=FIRST),
    "reduce_precision": _each(linear=never, linear_in=FIRST),
    **{name: _picked(linear_in=FIRST) for name in ("real", "imag", "conj")},
    **{name: _each(linear_in=jointly) for name in ("add", "sub", "add_any")},
    "complex": _picked(linear_in=jointly),
    **{name: _alias(linear_in=FIRST) for name in ("copy", "copy_p", "stop_gradient")},
    "random_clone": _each(flops=nothing, bytes=nothing),
    "mul": _each(linear_in=((0,), (1,))),
    "div": _each(linear_in=FIRST, sums_survive=_divides_exactly, dear=True),
    "select_n": _picked(linear_in=_chosen, indices=lambda _: (0,)),
    "convert_element_type": _picked(
        linear=_widens,
        linear_in=FIRST,
        sums_survive=_conversion_adds_up,
        order_survives=_conversion_keeps_order,
    ),
    "threefry2x32": _each(),
    **{name: _passed_on(run_identity) for name in _IDENTITIES},
    "optimization_barrier": _passed_on(run_barrier),
}


def constrains_sharding(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a `jax.lax.with_sharding_constraint` of the user's."""
    return bool(eqn.primitive.name == "sharding_constraint")


_SCALAR_OPERATIONS = frozenset(
    """
    abs add and atan2 cbrt ceil clamp compare complex constant convert cosine count_leading_zeros
    divide exponential exponential_minus_one floor imag is_finite log log_plus_one logistic maximum
    minimum multiply negate not or popcnt power real remainder round_nearest_afz round_nearest_even
    rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan
    tanh xor return broadcast_in_dim reduce_precision
    acos acosh asin asinh atan atanh bessel_i1e broadcast_add broadcast_compare conj cosh digamma
    erf erf_inv erfc is_inf is_neg_inf is_pos_inf lgamma next_after polygamma sinh square zeta
    """.split()
)


def unknown_rule(eqn: JaxprEqn) -> ShardingRule | None:
    """Return the elementwise rule of a primitive in no table, if its lowering shows it to be one.

    The primitive is lowered on its own; it is elementwise if all it becomes are elementwise
    operations of the compiler. So operators that later versions of jax add need no entry.
    """
    if compat.subjaxprs(eqn) or eqn.effects or not eqn.outvars:
        return None
    rule = elementwise_rule(eqn)
    if rule is None or not rule.factors:
        return None
    avals = tuple((shape_of(atom), dtype_of(atom)) for atom in eqn.invars)
    return rule if _lowers_elementwise(_Lowering(eqn, (eqn.primitive.name, avals))) else None


class _Lowering:
    """An equation compared by its key, so that each signature is lowered once."""

    def __init__(self, eqn: JaxprEqn, key: tuple[Hashable, ...]) -> None:
        self.eqn, self.key = eqn, key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Lowering) and self.key == other.key


@cached_by_program(1024)
def _lowers_elementwise(lowering: _Lowering) -> bool:
    eqn = lowering.eqn
    shapes = [jax.ShapeDtypeStruct(shape_of(a), dtype_of(a)) for a in eqn.invars]
    try:
        text = jax.jit(lambda *values: compat.bind(eqn, values)).lower(*shapes).as_text()
    except Exception:  # a primitive may refuse to lower for this platform in any way it likes
        return False
    found = re.findall(r"(?:stablehlo|chlo)\.(\w+)", text)
    if re.search(r"custom_call|\bcall @", text) or not found:
        return False
    broadcast_of_tensor = re.search(r"stablehlo\.broadcast_in_dim %\S+, dims = \[\d", text)
    return not broadcast_of_tensor and all(name in _SCALAR_OPERATIONS for name in found)


def is_barrier(eqn: JaxprEqn) -> bool:
    """Return whether `eqn` keeps the compiler from merging what is before it with what is after."""
    return bool(eqn.primitive.name == "optimization_barrier")


def is_selection(eqn: JaxprEqn) -> bool:
    """Return whether an equation selects between its operands behind the first by the first."""
    return bool(eqn.primitive.name == "select_n")


def is_comparison(eqn: JaxprEqn) -> bool:
    """Return whether an operator compares two numbers."""
    return eqn.primitive.name in ("eq", "ne", "ge", "gt", "le", "lt")


def is_conjunction(eqn: JaxprEqn) -> bool:
    """Return whether an equation is the "and" of truth values."""
    return eqn.primitive.name == "and" and eqn.outvars[0].aval == eqn.invars[0].aval


def extreme_taken(eqn: JaxprEqn) -> str | None:
    """Return "max" or "min" if an equation takes the larger or smaller of its operands."""
    name = eqn.primitive.name
    return name if name in ("max", "min") else None


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Return whether each element of the result depends on those at its place alone."""
    return eqn.primitive.name in _NAMES


def is_sum(eqn: JaxprEqn) -> bool:
    """Return whether an equation adds its operands."""
    return eqn.primitive.name in ("add", "add_any")


_LINEAR: dict[str, tuple[tuple[int, str], ...]] = {
    "add": ((0, "+"), (1, "+")),
    "add_any": ((0, "+"), (1, "+")),
    "sub": ((0, "+"), (1, "-")),
    "neg": ((0, "-"),),
    "mul": ((0, "*"), (1, "*")),
    "div": ((0, "/"),),
    "copy": ((0, "+"),),
}


def linear_terms(eqn: JaxprEqn) -> tuple[tuple[int, str], ...]:
    """Return how the result is linear in operands: (position, "+" or "-") where it is added or
    taken away, "*" or "/" where the other operand multiplies or divides it; else empty."""
    if eqn.primitive.name == "convert_element_type":
        return ((0, "+"),) if addends(eqn) else ()
    return _LINEAR.get(eqn.primitive.name, ())


_ADDENDS = {"add": (0, 1), "add_any": (0, 1), "sub": (0,), "scatter-add": (0,)}


def addends(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the positions of the operands to which, as they are, the result adds others."""
    name = eqn.primitive.name
    if name == "convert_element_type":  # which makes weakly typed numbers strongly typed, too
        return (0,) if dtype_of(eqn.invars[0]) == dtype_of(eqn.outvars[0]) else ()
    return _ADDENDS.get(name, ())


def is_masking_sum(eqn: JaxprEqn) -> bool:
    """Return whether an equation adds its operands, or takes one from the other."""
    return eqn.primitive.name in ("add", "add_any", "sub")
