"""State that is converted for the forward pass is converted again for the backward pass.

A plan that keeps a parameter in pieces pays for gathering it at each of its readers, and holds it
whole only there (FSDP; ZeRO stage 3, Rajbhandari et al. 2020). Where one program runs both passes,
a gather for both is one expression: computed once, the whole parameter would be held in between.
So what follows the forward pass reads such state from behind a barrier, which also waits for the
forward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jax import lax

from alpa_interchange import ShardingSpec, Strategy
from alpa_meta.compat import Literal, Var, is_drop
from alpa_meta.frontend.added_equations import equations_of
from alpa_meta.spmd import JaxprPlan


def with_second_gathers(
    eqns: Sequence[Any],
    plan: JaxprPlan,
    invars: Sequence[Any],
    state: Collection[Any],
    phases: Sequence[str],
) -> tuple[tuple[Any, ...], JaxprPlan]:
    """Return the equations of a task and their plan, with a barrier where the forward pass ends.

    `state` are the inputs concerned, `phases` those of the equations.
    """
    specs = dict(zip(invars, plan.inputs, strict=True))
    converted: set[tuple[Any, ShardingSpec]] = set()
    again: dict[Any, None] = {}
    last, position = None, len(eqns)
    for k, (eqn, step, phase) in enumerate(zip(eqns, plan.strategies, phases, strict=True)):
        for atom, spec in zip(eqn.invars, step.operands, strict=True):
            if isinstance(atom, Literal) or atom not in state or spec == specs[atom]:
                continue
            if phase == "forward":
                converted.add((atom, spec))
            elif (atom, spec) in converted:
                again[atom] = None
                position = min(position, k)
    for eqn, step, phase in list(zip(eqns, plan.strategies, phases, strict=True))[:position]:
        for var, spec in zip(eqn.outvars, step.results, strict=True):
            if phase == "forward" and not is_drop(var) and _is_plain(var):
                last, specs[var] = var, spec
    if not again or last is None:
        return tuple(eqns), plan
    held = [last, *again]
    fresh = [Var(var.aval) for var in held]
    added = equations_of(lambda *values: lax.optimization_barrier(values), held, fresh)
    kept = tuple(specs[var] for var in held)
    renamed = dict(zip(held, fresh, strict=True))
    rest = [
        eqn if phase == "forward" else _reading(eqn, renamed)
        for eqn, phase in zip(eqns[position:], phases[position:], strict=True)
    ]
    barrier = Strategy(assignment=(), operands=kept, results=kept)
    strategies = (*plan.strategies[:position], barrier, *plan.strategies[position:])
    return (*eqns[:position], *added, *rest), JaxprPlan(plan.inputs, strategies, plan.outputs)


def _reading(eqn: Any, renamed: dict[Any, Any]) -> Any:
    """Return an equation that reads the renamed values."""
    atoms = [atom if isinstance(atom, Literal) else renamed.get(atom, atom) for atom in eqn.invars]
    return eqn.replace(invars=atoms)


def _is_plain(var: Any) -> bool:
    return isinstance(getattr(var.aval, "dtype", None), np.dtype)
