"""How values leave the microbatches: which do, and how their parts become the batch's value.

A value that the update or the result reads is added up over the microbatches in an accumulator
(float32 or wider). A replicated value is the mean of what it is added up to, a maximum or minimum
is combined as one, and values that are split are joined along the dim of examples.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from jax import lax

from alpa_meta.compat import JaxprEqn, Literal, Var, dtype_of, is_drop, shape_of
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.staging import Staging
from alpa_meta.microbatch.placement import REPLICATED, Placement
from alpa_meta.passes.added_equations import equations_of
from alpa_meta.program_caches import cached_by_program
from alpa_meta.step.program import Program
from alpa_meta.types import DType, HostArray


@frozen(eq=False)
class Accumulation:
    """The values that leave the microbatches, and the equations that carry them out.

    `accumulators` maps a value to the variable of its total, `joined` to its dim of examples; with
    one microbatch both are empty. `placements` are the program's.
    """

    accumulators: Mapping[Var, Var]
    joined: Mapping[Var, int]
    placements: Mapping[Var, Placement]
    num_microbatches: int

    def first(self, value: Var, total: Var) -> list[JaxprEqn]:
        """Return equations for total = what the accumulation of `value` starts from."""
        like = self.accumulators[value]
        told = (self._extreme(value), dtype_of(like), shape_of(like))
        return equations_of(_start, [], [total], *told)

    def added(self, value: Var, following: Var) -> list[JaxprEqn]:
        """Return equations for following = accumulator + value in the accumulator's dtype (or the
        larger or smaller of the two).
        """
        accumulator = self.accumulators[value]
        extreme = self._extreme(value)
        if extreme is not None:
            combine = {"max": lax.max, "min": lax.min}[extreme]
            return equations_of(combine, [accumulator, value], [following])
        if dtype_of(accumulator) == dtype_of(value):
            return equations_of(jnp.add, [accumulator, value], [following])
        return equations_of(_add, [accumulator, value], [following])

    def scaled(self, value: Var) -> list[JaxprEqn]:
        """Return equations for value = what was accumulated, in the value's dtype."""
        mean = self.placements.get(value, REPLICATED).kind == "replicated"
        count = self.num_microbatches if mean else 1
        return equations_of(_scale, [self.accumulators[value]], [value], count, dtype_of(value))

    def _extreme(self, value: Var) -> str | None:
        """Return "max" or "min" if that is how a value's microbatch parts combine, else None."""
        placement = self.placements.get(value, REPLICATED)
        return placement.reduction if placement.kind == "extreme" else None


def _start(extreme: str | None, dtype: DType, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast(_identity(extreme, dtype), shape)


def _add(total: jax.Array, part: jax.Array) -> jax.Array:
    return total + lax.convert_element_type(part, total.dtype)


def _scale(count: int, dtype: DType, total: jax.Array) -> jax.Array:
    if count > 1:
        exact = jnp.issubdtype(dtype, jnp.inexact)
        total = total * (1.0 / count) if exact else total // count
    return lax.convert_element_type(total, dtype)


@cached_by_program(4)  # asked for every stage
def crossing_values(staging: Staging, program: Program) -> Mapping[Var, frozenset[int]]:
    """Return the values of the microbatches that the update or the result needs.

    Maps each to the stages of the update equations that read it.
    """
    inside = {
        var
        for eqn, phase in zip(staging.eqns, staging.phases, strict=True)
        if phase != "update"
        for var in eqn.outvars
        if not is_drop(var)
    }
    readers: dict[Var, set[int]] = {}
    for eqn, phase, stage in zip(staging.eqns, staging.phases, staging.stages, strict=True):
        if phase == "update":
            for atom in eqn.invars:
                if not isinstance(atom, Literal) and atom in inside:
                    readers.setdefault(atom, set()).add(stage)
    for atom in program.jaxpr.outvars:
        if not isinstance(atom, Literal) and atom in inside:
            readers.setdefault(atom, set())
    return {var: frozenset(stages) for var, stages in readers.items()}


def accumulation_of(program: Program, crossing: Mapping[Var, frozenset[int]]) -> Accumulation:
    """Return how the `crossing_values` leave the microbatches; refuses an update that reads one
    entry per example.
    """
    accumulators: dict[Var, Var] = {}
    joined: dict[Var, int] = {}
    for value, update_stages in crossing.items() if program.num_microbatches > 1 else ():
        known = value in program.placements or program.inexact
        assert known, f"nothing says how microbatches hold {value}: a sum would be taken for a mean"
        placement = program.placements.get(value, REPLICATED)
        if placement.kind == "split":
            if update_stages:
                raise PlanError(
                    "the update reads a value with one entry per example; with more than one "
                    "microbatch the update may only read sums and means over the batch"
                )
            joined[value] = placement.dim
            continue
        dtype = dtype_of(value)
        narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        if narrow and placement.kind != "extreme":
            dtype = np.dtype(np.float32)
        accumulators[value] = Var(jax.core.ShapedArray(shape_of(value), dtype))
    return Accumulation(accumulators, joined, program.placements, program.num_microbatches)


def _identity(extreme: str | None, dtype: DType) -> HostArray:
    """Return the scalar an accumulation starts from: 0, or the least or greatest value."""
    if extreme is None:
        return np.zeros((), dtype)
    if dtype == np.bool_:
        return np.asarray(extreme == "min")
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf if extreme == "max" else np.inf, dtype)
    limits = np.iinfo(dtype)
    return np.asarray(limits.min if extreme == "max" else limits.max, dtype)
