"""What works on examples but moves no gradient: it runs once, in the update, on all of them.

A median or a sort of the losses, a queue that takes a row of each example, a table of priorities
written at places that the batch says: no microbatch has all that they read, and nothing of the
backward pass waits for them. So they are of the update, as are a loss at the new parameters and a
line search, and what they read of the examples is put together there: each microbatch has its part
among zeros (false, where truths are or-ed), and the whole is their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_of
from alpa_meta.microbatch.placement import SUM, Placement


def aside(eqns: Sequence[JaxprEqn], phases: Sequence[str]) -> frozenset[int]:
    """Return the positions of the equations that nothing of the backward pass depends on, and that
    have no effects."""
    found, wanted = set(), set[Atom]()
    for k in range(len(eqns) - 1, -1, -1):
        eqn = eqns[k]
        if phases[k] == "backward" or any(var in wanted for var in eqn.outvars):
            wanted.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
        elif not eqn.effects:
            found.add(k)
    return frozenset(found)


def gathered(var: Var) -> Placement | None:
    """Return how the whole of a value that is split comes together; None if it does not."""
    dtype = dtype_of(var)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    return Placement("extreme", reduction="max") if jnp.issubdtype(dtype, jnp.bool_) else SUM
