"""Loops with a condition per example, which `jax.vmap` makes: one condition, and carries selected.

A while loop whose condition depends on the mapped dim goes on while any example does, and keeps the
carries of the others; jax leaves that to the compiler. It is written out here, so that every
executor and every analysis sees an ordinary loop:

    while reduce_or(test(carry)):  carry = select(test(carry), body(carry), carry)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax import lax
from jax.extend.core import jaxpr_as_fun

from alpa_meta.compat import ClosedJaxpr, JaxprEqn, with_eqns
from alpa_meta.operators.regions import bodies, is_while
from alpa_meta.operators.rewrites.replacement import replacement


def with_one_condition(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program with loops that have one condition each."""
    return with_eqns(program, _written(program.jaxpr.eqns))


def _written(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        if not (is_while(eqn) and bodies(eqn)[0].out_avals[0].shape):
            yield eqn
            continue
        yield from replacement(_written_out(eqn), eqn.invars, eqn.outvars, eqn)


def _written_out(eqn: JaxprEqn) -> Any:
    num_test = eqn.params["cond_nconsts"]
    first = num_test + eqn.params["body_nconsts"]
    test, body = map(jaxpr_as_fun, bodies(eqn))

    def run(*values: Any) -> Any:
        def going_on(carry: Any) -> Any:
            return test(*values[:num_test], *carry)[0]

        def trip(carry: Any) -> Any:
            still = going_on(carry)
            after = body(*values[num_test:first], *carry)
            return tuple(_selected(still, *pair) for pair in zip(after, carry, strict=True))

        def one_condition(carry: Any) -> Any:
            still = going_on(carry)
            return lax.reduce_or(still, range(still.ndim))

        return lax.while_loop(one_condition, trip, tuple(values[first:]))

    return run


def _selected(still: Any, after: Any, before: Any) -> Any:
    places = range(still.ndim)
    return lax.select(lax.broadcast_in_dim(still, before.shape, places), after, before)
