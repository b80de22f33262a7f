"""Loops with a condition per example, which `jax.vmap` makes: one condition, and carries selected.

A while loop whose condition depends on the mapped dim goes on while any example does, and keeps the
carries of the others; jax leaves that to the compiler. It is written out here, so that every
executor and every analysis sees an ordinary loop:

    while reduce_or(test(carry)):  carry = select(test(carry), body(carry), carry)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from alpa_meta.compat import ClosedJaxpr, JaxprEqn, with_eqns
from alpa_meta.operators.regions import bodies, is_while
from alpa_meta.operators.rewrites.replacement import replacement
from alpa_meta.types import Function


def with_one_condition(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program with loops that have one condition each."""
    return with_eqns(program, _written(program.jaxpr.eqns))


def _written(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        if not (is_while(eqn) and bodies(eqn)[0].out_avals[0].shape):
            yield eqn
            continue
        yield from replacement(_written_out(eqn), eqn.invars, eqn.outvars, eqn)


def _written_out(eqn: JaxprEqn) -> Function[tuple[Array, ...]]:
    num_test = eqn.params["cond_nconsts"]
    first = num_test + eqn.params["body_nconsts"]
    test, body = map(jaxpr_as_fun, bodies(eqn))

    def run(*values: Array) -> tuple[Array, ...]:
        def going_on(carry: tuple[Array, ...]) -> Array:
            still: Array = test(*values[:num_test], *carry)[0]
            return still

        def trip(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            still = going_on(carry)
            after = body(*values[num_test:first], *carry)
            return tuple(_selected(still, *pair) for pair in zip(after, carry, strict=True))

        def one_condition(carry: tuple[Array, ...]) -> Array:
            still = going_on(carry)
            return lax.reduce_or(still, range(still.ndim))

        return lax.while_loop(one_condition, trip, tuple(values[first:]))

    return run


def _selected(still: Array, after: Array, before: Array) -> Array:
    places = range(still.ndim)
    return lax.select(lax.broadcast_in_dim(still, before.shape, places), after, before)
