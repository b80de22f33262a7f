"""From a user's step function to one flat jaxpr.

`inline` substitutes the bodies of call equations (jit, custom_jvp, custom_vjp, linear solves, ...)
and the implementations of equinox' and lineax' primitives. It keeps the name stack of the call in
front of each inlined equation, so that it still shows which equations belong to the forward and the
backward pass. Loops, conditionals, recomputation regions and opaque kernels stay single equations,
their bodies inlined in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from alpa_meta.compat import (
    ClosedJaxpr,
    Literal,
    Var,
    closed,
    consts,
    is_drop,
    open_jaxpr,
    with_outer_name_stack,
    without_user_mesh,
)
from alpa_meta.operators.regions import called, with_bodies
from alpa_meta.passes.order import rewritten


def trace(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return (inlined ClosedJaxpr, output shape tree) of `function` on abstract `args`."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return inline(jaxpr), shapes


def inline(jaxpr: Any) -> Any:
    """Return `jaxpr` with every call equation replaced by its body, rewritten by all `PASSES`."""
    source = closed(jaxpr)
    inner = open_jaxpr(source)
    constvars, values = list(inner.constvars), consts(source)
    env: dict[Any, Any] = {var: var for var in [*inner.invars, *constvars]}
    eqns: list[Any] = []
    _inline_eqns(inner.eqns, env, eqns, constvars, values, None)
    outvars = [atom if isinstance(atom, Literal) else env[atom] for atom in inner.outvars]
    flat = inner.replace(constvars=constvars, eqns=eqns, outvars=outvars)
    return rewritten(ClosedJaxpr(flat, values))


def _inline_eqns(
    source: Sequence[Any],
    env: dict[Any, Any],
    eqns: list[Any],
    constvars: list[Any],
    values: list[Any],
    stack: Any,
) -> None:
    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else env[atom]

    for eqn in source:
        here = eqn.source_info.name_stack if stack is None else stack + eqn.source_info.name_stack
        body, operands = called(eqn)
        if body is not None:
            inner = open_jaxpr(body)
            if len(inner.invars) != len(operands):
                raise ValueError(
                    f"cannot inline {eqn.primitive.name!r}: it has {len(operands)} operands, but "
                    f"its body takes {len(inner.invars)}"
                )
            scope: dict[Any, Any] = {}
            for var, value in zip(inner.constvars, consts(body), strict=True):
                scope[var] = _constant(var, value, constvars, values)
            scope.update(zip(inner.invars, map(read, operands), strict=True))
            _inline_eqns(inner.eqns, scope, eqns, constvars, values, here)
            for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
                env[var] = atom if isinstance(atom, Literal) else scope[atom]
            continue
        outvars = []
        for var in eqn.outvars:
            fresh = var if is_drop(var) else Var(var.aval)
            outvars.append(fresh)
            if not is_drop(var):
                env[var] = fresh
        replacement: dict[str, Any] = {"params": with_bodies(eqn, inline).params}
        if stack is not None:
            replacement["source_info"] = with_outer_name_stack(eqn, stack)
        eqns.append(
            without_user_mesh(eqn).replace(
                invars=[read(a) for a in eqn.invars], outvars=outvars, **replacement
            )
        )


def _constant(var: Any, value: Any, constvars: list[Any], values: list[Any]) -> Any:
    if np.ndim(value) == 0 and not isinstance(value, jax.Array):
        return Literal(value, var.aval)
    fresh = Var(var.aval)
    constvars.append(fresh)
    values.append(value)
    return fresh
