"""The equations of a small function, in place of one equation of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from alpa_meta.compat import Literal, Var, open_jaxpr


def replacement(
    function: Callable[..., Any], operands: Sequence[Any], result: Any, replaced: Any
) -> list[Any]:
    """Return the equations of `function` of `operands` that compute the variable `result`.

    They are of the user's line of the equation `replaced`. The function must call no jitted one.
    """
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(*(atom.aval for atom in operands)))
    known: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    known[jaxpr.outvars[0]] = result
    for inner in jaxpr.eqns:
        for var in inner.outvars:
            known.setdefault(var, Var(var.aval))
    return [
        inner.replace(
            invars=[a if isinstance(a, Literal) else known[a] for a in inner.invars],
            outvars=[known[var] for var in inner.outvars],
            source_info=replaced.source_info,
        )
        for inner in jaxpr.eqns
    ]
