"""The equations of a small traced function, put into a program in place of others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import jax
from jax import lax
from jax.core import ShapedArray

from alpa_meta.compat import Atom, Jaxpr, JaxprEqn, Literal, Var, array_type, is_drop, open_jaxpr
from alpa_meta.types import Function, Params


def replacement(
    function: Function[object],
    operands: Sequence[Var | Literal],
    results: Sequence[Var],
    replaced: JaxprEqn,
) -> list[JaxprEqn]:
    """Return the equations of `function` of `operands` that compute `results`.

    They are of the user's line of the equation `replaced`. The function must call no jitted one.
    """
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(*(atom.aval for atom in operands)))
    return instantiated(jaxpr, operands, results, replaced)


def instantiated(
    template: Jaxpr,
    operands: Sequence[Var | Literal],
    results: Sequence[Var],
    replaced: JaxprEqn | None = None,
) -> list[JaxprEqn]:
    """Return the equations of a traced function with these operands and results.

    They are of the user's line of `replaced`, if given. The template closes over no arrays.
    """
    if template.constvars:
        raise ValueError("equations put into a program must not close over arrays")
    known: dict[Var, Atom] = dict(zip(template.invars, operands, strict=True))
    for atom, result in zip(template.outvars, results, strict=True):
        if isinstance(atom, Var) and not is_drop(result):
            known.setdefault(atom, result)
    info: Params = {} if replaced is None else {"source_info": replaced.source_info}
    found = []
    for eqn in template.eqns:
        for var in eqn.outvars:
            known.setdefault(var, var if is_drop(var) else Var(var.aval))
        invars = [a if isinstance(a, Literal) else known[a] for a in eqn.invars]
        outvars = cast(list[Var], [known[var] for var in eqn.outvars])
        found.append(eqn.replace(invars=invars, outvars=outvars, **info))
    for atom, result in zip(template.outvars, results, strict=True):
        source = atom if isinstance(atom, Literal) else known[atom]
        if source is not result and not is_drop(result):
            found.append(_copy(source, result))
    return found


def _copy(source: Var | Literal, result: Var) -> JaxprEqn:
    made: JaxprEqn = _traced_copy(array_type(result)).replace(invars=[source], outvars=[result])
    return made


@functools.lru_cache(maxsize=1 << 10)  # gradients of equal layers are of the same types
def _traced_copy(aval: ShapedArray) -> JaxprEqn:
    copy: JaxprEqn
    (copy,) = open_jaxpr(jax.make_jaxpr(lax.copy_p.bind)(aval)).eqns
    return copy
