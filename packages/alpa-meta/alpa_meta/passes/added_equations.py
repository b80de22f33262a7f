"""Equations and jaxprs made by this package: parts of a program put together, and steps added to
it."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import jax

from alpa_meta.compat import Atom, Jaxpr, JaxprEqn, Var, dtype_of, open_jaxpr, shape_of
from alpa_meta.operators.rewrites.replacement import instantiated
from alpa_meta.program_caches import cached_by_program
from alpa_meta.step.trace import inline
from alpa_meta.types import DType, Function


def equations_of(
    function: Function[object], inputs: Sequence[Atom], outputs: Sequence[Var], *told: Hashable
) -> list[JaxprEqn]:
    """Return equations computing `outputs` from `inputs` (variables) by a jax function, which is
    given what it is `told` before them; one that closes over nothing is traced once for inputs of
    the same types."""
    avals = tuple((shape_of(var), dtype_of(var)) for var in inputs)
    closes = getattr(function, "__closure__", None) is not None
    made = (_traced.__wrapped__ if closes else _traced)(function, told, avals)
    return instantiated(made, inputs, outputs)


def at_line_of(replaced: JaxprEqn, eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Return equations as of the user's line of the one that they are put in place of."""
    return [eqn.replace(source_info=replaced.source_info) for eqn in eqns]


@cached_by_program(1 << 10)  # a gradient is added up as those of equal layers are
def _traced(
    function: Function[object],
    told: tuple[Hashable, ...],
    avals: tuple[tuple[tuple[int, ...], DType], ...],
) -> Jaxpr:
    inputs = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals)
    made: Jaxpr = open_jaxpr(inline(jax.make_jaxpr(functools.partial(function, *told))(*inputs)))
    return made


def jaxpr_of(
    template: Jaxpr,
    constvars: list[Var],
    invars: Sequence[Atom],
    outvars: Sequence[Atom],
    eqns: list[JaxprEqn],
) -> Jaxpr:
    """Return a jaxpr of `eqns` made like `template`."""
    effects = set().union(*(eqn.effects for eqn in eqns)) if eqns else set()
    made: Jaxpr = template.replace(
        constvars=constvars,
        invars=list(invars),
        outvars=list(outvars),
        eqns=eqns,
        effects=effects,
        debug_info=template.debug_info.with_unknown_names(),
    )
    return made
