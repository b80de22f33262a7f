"""From a user's step function to one flat jaxpr.

`inline` substitutes the bodies of call equations (jit, custom_jvp, custom_vjp, linear solves, ...)
and the implementations of equinox' and lineax' primitives. It keeps the name stack of the call in
front of each inlined equation, so that it still shows which equations belong to the forward and the
backward pass. Loops, conditionals, recomputation regions and opaque kernels stay single equations,
their bodies inlined in turn.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.extend.source_info_util import NameStack

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    closed,
    consts,
    is_drop,
    open_jaxpr,
    source_line,
    subjaxprs,
    with_outer_name_stack,
    without_user_mesh,
)
from alpa_meta.errors import PlanError
from alpa_meta.operators.regions import called, with_bodies
from alpa_meta.operators.rewrites.former_axes import (
    effects_without_axes,
    former_axes,
    of_one_member,
    unbound_axis,
)
from alpa_meta.passes.flat_program import FlatProgram
from alpa_meta.passes.order import rewritten
from alpa_meta.types import Function, Params, PyTree


def trace(function: Function[PyTree], *args: PyTree) -> tuple[ClosedJaxpr, PyTree]:
    """Return (inlined ClosedJaxpr, output shape tree) of `function` on abstract `args`.

    Axes of a former `jax.pmap` that the function still names have one member, with a warning.
    """
    axes: list[str] = []
    while True:
        sizes = [(axis, 1) for axis in axes]
        try:
            jaxpr, shapes = jax.make_jaxpr(function, axis_env=sizes, return_shape=True)(*args)
        except NameError as error:
            axis = unbound_axis(error)
            if axis is None or axis in axes:
                raise
            axes.append(axis)
            continue
        if axes:
            warnings.warn(
                f"the step communicates over {', '.join(map(repr, axes))}, an axis of a former "
                "pmap that is not bound here: as the step runs on the whole batch, its axis has "
                "one member, and sums and means over it are left out",
                stacklevel=2,
            )
        return inline(jaxpr), shapes


def inline(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Return `jaxpr` with every call equation replaced by its body, after the `PASSES` of that
    moment."""
    source = closed(jaxpr)
    inner = open_jaxpr(source)
    constvars, values = list(inner.constvars), consts(source)
    env: dict[Var, Atom] = {var: var for var in [*inner.invars, *constvars]}
    eqns: list[JaxprEqn] = []
    _inline_eqns(inner.eqns, env, eqns, constvars, values, None)
    outvars = [atom if isinstance(atom, Literal) else env[atom] for atom in inner.outvars]
    effects = effects_without_axes(inner.effects)
    flat = inner.replace(constvars=constvars, eqns=eqns, outvars=outvars, effects=effects)
    return rewritten(FlatProgram(ClosedJaxpr(flat, values)), "inlined").closed


def _inline_eqns(
    source: Sequence[JaxprEqn],
    env: dict[Var, Atom],
    eqns: list[JaxprEqn],
    constvars: list[Var],
    values: list[Array],
    stack: NameStack | None,
) -> None:
    def read(atom: Atom) -> Atom:
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
            scope: dict[Var, Atom] = {}
            for var, value in zip(inner.constvars, consts(body), strict=True):
                scope[var] = _constant(var, value, constvars, values)
            scope.update(zip(inner.invars, map(read, operands), strict=True))
            _inline_eqns(inner.eqns, scope, eqns, constvars, values, here)
            for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
                env[var] = atom if isinstance(atom, Literal) else scope[atom]
            continue
        if former_axes(eqn):
            fresh = [Var(var.aval) for var in eqn.outvars]
            read_eqn = eqn.replace(invars=[read(a) for a in eqn.invars], outvars=fresh)
            for var, (atom, added) in zip(eqn.outvars, of_one_member(read_eqn), strict=True):
                env[var] = atom
                eqns += added
            continue
        outvars = []
        for var in eqn.outvars:
            outvars.append(var if is_drop(var) else Var(var.aval))
            if not is_drop(var):
                env[var] = outvars[-1]
        replacement: Params = {"params": with_bodies(eqn, inline).params}
        if stack is not None:
            replacement["source_info"] = with_outer_name_stack(eqn, stack)
        if eqn.effects:
            if not subjaxprs(eqn):
                _check_order(eqn)
            replacement["effects"] = effects_without_axes(eqn.effects)
        eqns.append(
            without_user_mesh(eqn).replace(
                invars=[read(a) for a in eqn.invars], outvars=outvars, **replacement
            )
        )


def _check_order(eqn: JaxprEqn) -> None:
    """Refuse callbacks with an order, which jax keeps on one device only."""
    if any(type(effect).__name__.startswith("Ordered") for effect in eqn.effects):
        raise PlanError(
            f"{eqn.primitive.name} at {source_line(eqn)} is ordered, which jax cannot keep on "
            "several devices; leave out ordered=True"
        )


def _constant(var: Var, value: Array, constvars: list[Var], values: list[Array]) -> Atom:
    if np.ndim(value) == 0 and not isinstance(value, jax.Array):
        return Literal(value, var.aval)
    fresh = Var(var.aval)
    constvars.append(fresh)
    values.append(value)
    return fresh
