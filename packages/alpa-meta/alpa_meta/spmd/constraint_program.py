"""The fallback executor: a planned jaxpr under sharding constraints, not inside shard_map.

Every planned value is constrained to its planned sharding, where an operator yields it and where
another reads it differently. XLA's partitioner chooses the collectives in between, so the plan is a
wish here, not the program. An operator without a sharding rule is left free, and so is what the
plan keeps whole around it: the planner knew that it would run replicated, XLA may keep it sharded.

A constraint cannot say that a value is an unreduced sum. Sums are completed where they arise.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from attrs import evolve, field, frozen
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh

from alpa_interchange import LogicalMesh, ShardingSpec, Strategy
from alpa_meta import compat
from alpa_meta.compat import Atom, ClosedJaxpr, JaxprEqn, Var, shape_of
from alpa_meta.operators import sharding_rule
from alpa_meta.spmd.collectives import Collectives
from alpa_meta.spmd.evaluation import Scope, Walk, run_local
from alpa_meta.spmd.plan import JaxprPlan, RegionPlan
from alpa_meta.spmd.program import abstract_mesh, jax_sharding
from alpa_meta.types import Function


def constraint_program(
    closed: ClosedJaxpr,
    plan: JaxprPlan,
    mesh: LogicalMesh,
    jax_mesh: Mesh | AbstractMesh | None = None,
) -> Function[list[Array]]:
    """Return a function of global arrays that runs the planned jaxpr under sharding constraints.

    To be jitted by the caller with arguments sharded as `completed_plan(plan)` says, over
    `jax_mesh` if there is one: what is not constrained keeps its mesh, and JAX takes random keys
    and numbers over one and the same only.
    """
    completed = completed_plan(plan)
    over = abstract_mesh(mesh) if jax_mesh is None else jax_mesh.abstract_mesh

    def program(*values: Array) -> list[Array]:
        return _Constrained(mesh, Collectives(mesh), over=over).run(closed, completed, values)

    return program


def completed_plan(plan: JaxprPlan) -> JaxprPlan:
    """Return `plan` without unreduced sums: each is completed by the operator it arises from."""
    return JaxprPlan(
        _completed(plan.inputs),
        tuple(_completed_step(step) for step in plan.strategies),
        _completed(plan.outputs),
    )


def _completed_step(step: Strategy | RegionPlan) -> Strategy | RegionPlan:
    operands, results = _completed(step.operands), _completed(step.results)
    if isinstance(step, RegionPlan):
        return RegionPlan(operands, results, tuple(map(completed_plan, step.bodies)))
    return evolve(step, operands=operands, results=results)


def _completed(specs: Sequence[ShardingSpec]) -> tuple[ShardingSpec, ...]:
    return tuple(ShardingSpec(spec.dims) if spec.partial else spec for spec in specs)


@frozen(eq=False)
class _Constrained(Walk):
    """Runs each operator on global arrays and constrains them to the specs of the plan."""

    over: AbstractMesh = field(kw_only=True)
    free: set[Var] = field(factory=set, kw_only=True)  # variables that are not constrained

    def run(self, closed: ClosedJaxpr, plan: JaxprPlan, values: Sequence[Array]) -> list[Array]:
        self.free.update(free_variables(closed, plan))
        return super().run(closed, plan, self._constrained(values, plan.inputs))

    def operands(self, eqn: JaxprEqn, step: Strategy | RegionPlan, scope: Scope) -> list[Array]:
        planned = super().operands(eqn, step, scope)
        if not self.free.issuperset(eqn.outvars):
            return planned
        return [
            value if isinstance(atom, compat.Literal) or any(spec.dims) else scope.values[atom]
            for atom, spec, value in zip(eqn.invars, step.operands, planned, strict=True)
        ]

    def operator(self, eqn: JaxprEqn, strategy: Strategy, operands: Sequence[Array]) -> list[Array]:
        results = run_local(eqn, operands, _whole(eqn), self.mesh, self.collectives)
        if self.free.issuperset(eqn.outvars):
            return results
        return self._constrained(results, strategy.results)

    def region(self, eqn: JaxprEqn, plan: RegionPlan, operands: list[Array]) -> list[Array]:
        return self._constrained(super().region(eqn, plan, operands), plan.results)

    def completed(
        self, value: Array, natural: ShardingSpec, final: ShardingSpec, reason: str
    ) -> Array:
        return value  # constrained with the other results of its region

    def convert(
        self, value: Array, atom: Atom, source: ShardingSpec, target: ShardingSpec, reason: str
    ) -> Array:
        (converted,) = self._constrained([value], [target])
        return converted

    def _constrained(self, values: Sequence[Array], specs: Sequence[ShardingSpec]) -> list[Array]:
        if self.mesh.num_devices == 1:
            return list(values)
        return [
            lax.with_sharding_constraint(value, jax_sharding(spec, self.over))
            if jnp.ndim(value)
            else value
            for value, spec in zip(values, specs, strict=True)
        ]


def free_variables(closed: ClosedJaxpr, plan: JaxprPlan) -> set[Var]:
    """Return the results of operators without a rule, and what is whole in the plan around them.

    That is: results, all whole, of operators that read a free value, and whole operands of
    operators whose results are free, as far as they are whole where they arise.
    """
    jaxpr = compat.open_jaxpr(closed)
    steps = [
        (eqn, step)
        for eqn, step in zip(jaxpr.eqns, plan.strategies, strict=True)
        if isinstance(step, Strategy)
    ]
    whole = {
        var
        for eqn, step in steps
        for var in eqn.outvars
        if not any(any(spec.dims) for spec in step.results)
    }
    free = {var for eqn, _ in steps if sharding_rule(eqn) is None for var in eqn.outvars}
    size = -1
    while free and len(free) != size:
        size = len(free)
        for eqn, _ in steps:
            if any(atom in free for atom in _variables(eqn)) and whole.issuperset(eqn.outvars):
                free.update(eqn.outvars)
        for eqn, _ in reversed(steps):
            if free.issuperset(eqn.outvars):
                free.update(atom for atom in _variables(eqn) if atom in whole)
    return free


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if not isinstance(atom, compat.Literal)]


def _whole(eqn: JaxprEqn) -> Strategy:
    """Return the strategy that shards nothing: global arrays are one part."""
    return Strategy(
        assignment=(),
        operands=tuple(ShardingSpec.replicated(len(shape_of(atom))) for atom in eqn.invars),
        results=tuple(ShardingSpec.replicated(len(shape_of(var))) for var in eqn.outvars),
    )
