"""A constant that a scatter writes over stays apart from equal constants.

The gradient of a lookup is a scatter into zeros as large as the table. XLA makes one array of all
equal constants, those that only elementwise operators read included: on GPUs an optimiser's
`where(ok, update, 0)` then reads the array that the scatters copy, and XLA updates all tables that
read it in one kernel, for which it holds copies of them all. So what a scatter writes over is made
from a number behind a barrier. Not on host devices, where XLA drops barriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax import lax

from alpa_interchange import ShardingSpec, Strategy
from alpa_meta.compat import JaxprEqn, Literal, Var
from alpa_meta.operators import operator_of
from alpa_meta.passes.added_equations import equations_of
from alpa_meta.spmd import JaxprPlan

if TYPE_CHECKING:
    from alpa_meta.spmd.plan import RegionPlan

_SCALAR = Strategy(assignment=(), operands=(ShardingSpec(()),), results=(ShardingSpec(()),))


def _scatters(eqn: JaxprEqn) -> bool:
    operator = operator_of(eqn)
    return operator.written is not None and bool(operator.heavy)


def with_own_constants(
    eqns: Sequence[JaxprEqn], plan: JaxprPlan
) -> tuple[tuple[JaxprEqn, ...], JaxprPlan]:
    """Return the equations of a task and their plan, with a barrier before each such constant."""
    written = {
        eqn.invars[0] for eqn in eqns if _scatters(eqn) and not isinstance(eqn.invars[0], Literal)
    }
    found: list[JaxprEqn] = []
    steps: list[Strategy | RegionPlan] = []
    for eqn, step in zip(eqns, plan.strategies, strict=True):
        filled = operator_of(eqn).layout and isinstance(eqn.invars[0], Literal)
        if filled and eqn.outvars[0] in written:
            number = eqn.invars[0]
            own = Var(number.aval)
            (barrier,) = equations_of(lax.optimization_barrier, [Var(number.aval)], [own])
            found.append(barrier.replace(invars=[number]))
            steps.append(_SCALAR)
            eqn = eqn.replace(invars=[own, *eqn.invars[1:]])
        found.append(eqn)
        steps.append(step)
    return tuple(found), JaxprPlan(plan.inputs, tuple(steps), plan.outputs)
