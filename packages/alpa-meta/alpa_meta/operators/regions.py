"""Equations that hold programs: which there are, and one fold over their kinds.

    region       a loop, a conditional or a recomputation: an equation whose bodies are planned and
                 run operator by operator
    call         an equation that stands for its body, which replaces it (`jit`, `custom_vjp`, ...)

Everything else with a jaxpr among its parameters (a Pallas kernel, the function of a reduction) is
an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    call_body,
    closed,
    consts,
    implementation,
    linear_solve,
    open_jaxpr,
    subjaxprs,
)
from alpa_meta.types import Function

T = TypeVar("T")

_SCAN, _WHILE, _COND = "scan", "while", "cond"
_REMAT = ("remat", "remat2", "checkpoint")
_REGIONS = frozenset((_SCAN, _WHILE, _COND, *_REMAT))
_CALLS = frozenset(
    """
    jit pjit closed_call core_call call composite custom_vmap_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr eval_jaxpr custom_lin call_hi_primitive
    """.split()
)
_SOLVE = "custom_linear_solve"
# Equinox' and lineax': both lower them to their implementation, which is of jax operators.
_IMPLEMENTED = frozenset(
    """
    linear_solve maybe_set nonbatchable nondifferentiable_backward nontraceable select_if_vmap vprim
    """.split()
)


def primitives() -> frozenset[str]:
    """Return the names of the primitives that hold programs."""
    return _CALLS | {_SCAN, _WHILE, _COND, _SOLVE, *_REMAT}


def fold(
    eqn: JaxprEqn,
    *,
    scan: Callable[[], T],
    loop: Callable[[], T],
    branches: Callable[[], T],
    remat: Callable[[], T],
    operator: Callable[[], T] | None = None,
) -> T:
    """Return what the function for the kind of `eqn` says: a scan, a while loop, a conditional, a
    recomputation, or an operator."""
    name = eqn.primitive.name
    if name == _SCAN:
        return scan()
    if name == _WHILE:
        return loop()
    if name == _COND:
        return branches()
    if is_remat(eqn):
        return remat()
    if operator is None:
        raise ValueError(
            f"{name!r} is an operator, not a scan, while, cond or recomputation; plan it with a "
            "Strategy, not with a RegionPlan"
        )
    return operator()


def is_scan(eqn: JaxprEqn) -> bool:
    """Return whether `eqn` is a `lax.scan`."""
    return bool(eqn.primitive.name == _SCAN)


def scan_of(
    eqn: JaxprEqn, body: ClosedJaxpr, num_consts: int, num_carry: int
) -> Function[list[Array]]:
    """Return a scan like `eqn` of another body, whose first operands are `num_consts` constants
    and `num_carry` initial values, as a function of all operands."""
    function, first, last = jaxpr_as_fun(body), num_consts, num_consts + num_carry

    def run(*values: Array) -> list[Array]:
        def trip(
            carry: tuple[Array, ...], xs: tuple[Array, ...]
        ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
            outputs = function(*values[:first], *carry, *xs)
            return tuple(outputs[:num_carry]), tuple(outputs[num_carry:])

        carry, ys = lax.scan(
            trip,
            tuple(values[first:last]),
            tuple(values[last:]),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *ys]

    return run


def is_while(eqn: JaxprEqn) -> bool:
    """Return whether `eqn` is a `lax.while_loop`."""
    return bool(eqn.primitive.name == _WHILE)


def is_conditional(eqn: JaxprEqn) -> bool:
    """Return whether `eqn` runs one of its bodies."""
    return bool(eqn.primitive.name == _COND)


def is_remat(eqn: JaxprEqn) -> bool:
    """Return whether `eqn` is a recomputation region (jax.checkpoint)."""
    return eqn.primitive.name in _REMAT


def is_control_flow(eqn: JaxprEqn) -> bool:
    """Return whether `eqn` is a loop or a conditional."""
    return eqn.primitive.name in (_SCAN, _WHILE, _COND)


def is_region(eqn: JaxprEqn) -> bool:
    """Return whether the bodies of `eqn` are planned operator by operator."""
    return eqn.primitive.name in _REGIONS


def bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Return the bodies of a region, in order: of a while loop its test first."""
    if eqn.primitive.name == _WHILE:
        return [closed(eqn.params["cond_jaxpr"]), closed(eqn.params["body_jaxpr"])]
    return [closed(body) for _, body in subjaxprs(eqn)] if is_region(eqn) else []


def with_bodies(
    eqn: JaxprEqn, function: Callable[[ClosedJaxpr], ClosedJaxpr], tests: bool = True
) -> JaxprEqn:
    """Return a region with `function` of each of its bodies; any other equation as it is.

    The test of a while loop is left alone unless `tests`.
    """
    if not is_region(eqn):
        return eqn
    params = {
        name: value if name == "cond_jaxpr" and not tests else _mapped(value, function)
        for name, value in eqn.params.items()
    }
    changed: JaxprEqn = eqn.replace(params=params)
    return changed


def _mapped(value: object, function: Callable[[ClosedJaxpr], ClosedJaxpr]) -> object:
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, function) for item in value)
    if isinstance(value, ClosedJaxpr):
        return function(value)
    if isinstance(value, Jaxpr):
        made = function(closed(value))
        return value if consts(made) else open_jaxpr(made)  # an open body can hold no constants
    return value


def called(eqn: JaxprEqn) -> tuple[ClosedJaxpr | None, list[Atom]]:
    """Return the body of a call and its operands; no body if `eqn` is none."""
    if eqn.primitive.name == _SOLVE:
        return linear_solve(eqn)
    if eqn.primitive.name in _IMPLEMENTED:
        return implementation(eqn), list(eqn.invars)
    return call_body(eqn) if eqn.primitive.name in _CALLS else None, list(eqn.invars)
