"""Runs a planned jaxpr on one device's parts, inside shard_map."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import jax.numpy as jnp
import numpy as np
from attrs import field, frozen
from jax import Array, lax

from alpa_interchange import LogicalMesh, ShardingSpec, Strategy
from alpa_meta import compat
from alpa_meta.compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, dtype_of, shape_of
from alpa_meta.operators import LocalCall, operator_of, sharding_rule
from alpa_meta.operators.operator import behind_barrier
from alpa_meta.operators.regions import bodies, fold
from alpa_meta.spmd.bucketing import BucketLimits, in_buckets
from alpa_meta.spmd.collectives import Collectives
from alpa_meta.spmd.completion import complete, complete_sums, convert
from alpa_meta.spmd.plan import JaxprPlan, RegionPlan, stacked
from alpa_meta.types import Function
from ilp_sharding.strategies import Conversions


def evaluate(
    closed: ClosedJaxpr,
    plan: JaxprPlan,
    values: Sequence[Array],
    mesh: LogicalMesh,
    conversions: Conversions,
    collectives: Collectives | None = None,
    buckets: BucketLimits | None = None,
) -> list[Array]:
    """Return the local outputs of a planned jaxpr from its local inputs, inside shard_map."""
    walk = _OnDevice(mesh, collectives or Collectives(mesh), buckets, conversions=conversions)
    return walk.bucketed(closed, plan, values)


def run_local(
    eqn: JaxprEqn,
    operands: Sequence[Array],
    strategy: Strategy,
    mesh: LogicalMesh,
    collectives: Collectives | None = None,
) -> list[Array]:
    """Return the natural local results of one equation: partial sums are not yet completed."""
    rule = sharding_rule(eqn)
    if rule is None:
        return compat.bind(eqn, operands)
    call = LocalCall(eqn, list(operands), rule, strategy, mesh, collectives or Collectives(mesh))
    return operator_of(eqn).local(call)


@frozen(eq=False)
class Scope:
    """The values of one jaxpr, each with its spec, and those already converted."""

    values: dict[Var, Array] = field(factory=dict)
    specs: dict[Var, ShardingSpec] = field(factory=dict)
    converted: dict[tuple[Var, ShardingSpec], Array] = field(factory=dict)

    def write(self, var: Var, value: Array, spec: ShardingSpec) -> None:
        self.values[var], self.specs[var] = value, spec


@frozen(eq=False)
class Walk(ABC):
    """Runs the equations of a planned jaxpr, regions included, as an executor says."""

    mesh: LogicalMesh
    collectives: Collectives
    buckets: BucketLimits | None = None

    @abstractmethod
    def operator(self, eqn: JaxprEqn, strategy: Strategy, operands: Sequence[Array]) -> list[Array]:
        """Return the results of an operator in the specs its strategy gives them."""

    @abstractmethod
    def convert(
        self, value: Array, atom: Atom, source: ShardingSpec, target: ShardingSpec, reason: str
    ) -> Array:
        """Return the value of `atom`, which has the spec `source`, in the spec `target`."""

    @abstractmethod
    def completed(
        self, value: Array, natural: ShardingSpec, final: ShardingSpec, reason: str
    ) -> Array:
        """Return the result of a region that left its body as `natural`, its sums completed."""

    def bucketed(
        self, closed: ClosedJaxpr, plan: JaxprPlan, values: Sequence[Array]
    ) -> list[Array]:
        """Run a whole program or the body of a loop, with its collectives in buckets."""

        def run(*given: Array) -> list[Array]:
            return self.run(closed, plan, given)

        return in_buckets(run, self.buckets)(*values)

    def run(self, closed: ClosedJaxpr, plan: JaxprPlan, values: Sequence[Array]) -> list[Array]:
        jaxpr, scope = compat.open_jaxpr(closed), Scope()
        _check_length("inputs", plan.inputs, jaxpr.invars)
        _check_length("strategies", plan.strategies, jaxpr.eqns)
        _check_length("outputs", plan.outputs, jaxpr.outvars)
        for var, value in zip(jaxpr.constvars, compat.consts(closed), strict=True):
            scope.write(var, jnp.asarray(value), ShardingSpec.replicated(len(shape_of(var))))
        for var, value, spec in zip(jaxpr.invars, values, plan.inputs, strict=True):
            scope.write(var, value, spec)
        for eqn, step in zip(jaxpr.eqns, plan.strategies, strict=True):
            with self.collectives.at(eqn):
                self._eqn(eqn, step, scope)
        return [
            self._read(atom, spec, scope, f"output {k}")
            for k, (atom, spec) in enumerate(zip(jaxpr.outvars, plan.outputs, strict=True))
        ]

    def _eqn(self, eqn: JaxprEqn, step: Strategy | RegionPlan, scope: Scope) -> None:
        name = eqn.primitive.name
        _check_length(f"operands of {name!r}", step.operands, eqn.invars)
        operands = self.operands(eqn, step, scope)
        if isinstance(step, RegionPlan):
            results = self.region(eqn, step, operands)
        else:
            results = self.operator(eqn, step, operands)
        for var, value, spec in zip(eqn.outvars, results, step.results, strict=True):
            scope.write(var, value, spec)

    def operands(self, eqn: JaxprEqn, step: Strategy | RegionPlan, scope: Scope) -> list[Array]:
        """Return the operands of an equation in the specs that it reads them in."""
        name = eqn.primitive.name
        return [
            self._read(atom, spec, scope, f"operand {k} of {name}")
            for k, (atom, spec) in enumerate(zip(eqn.invars, step.operands, strict=True))
        ]

    def _read(self, atom: Atom, spec: ShardingSpec, scope: Scope, reason: str) -> Array:
        if isinstance(atom, compat.Literal):
            value = _literal(atom)
            if not shape_of(atom):
                return value
            source = ShardingSpec.replicated(len(shape_of(atom)))
            target = ShardingSpec(spec.dims)
            return self.convert(jnp.asarray(value), atom, source, target, reason)
        source = scope.specs[atom]
        if source == spec:
            return scope.values[atom]
        key = (atom, spec)
        if key not in scope.converted:
            scope.converted[key] = self.convert(scope.values[atom], atom, source, spec, reason)
        return scope.converted[key]

    def region(self, eqn: JaxprEqn, plan: RegionPlan, operands: list[Array]) -> list[Array]:
        """Return the results of a region in the specs of its plan."""
        return fold(
            eqn,
            scan=lambda: self._scan(eqn, plan, operands),
            loop=lambda: self._while(eqn, plan, operands),
            branches=lambda: self._cond(eqn, plan, operands),
            remat=lambda: self._recomputation(eqn, plan, operands),
        )

    def _recomputation(self, eqn: JaxprEqn, plan: RegionPlan, operands: list[Array]) -> list[Array]:
        """Run the body behind a barrier, so that XLA does not merge it with the first run."""
        (body,) = plan.bodies
        _check_specs(eqn, "operands", plan.operands, body.inputs)
        prevented = eqn.params.get("prevent_cse", True)
        if any(prevented) if isinstance(prevented, (tuple, list)) else prevented:
            operands = behind_barrier(operands)
        results = self.run(bodies(eqn)[0], body, operands)
        return self._all_completed(eqn, results, body.outputs, plan.results)

    def _all_completed(
        self,
        eqn: JaxprEqn,
        results: Sequence[Array],
        natural: Sequence[ShardingSpec],
        final: Sequence[ShardingSpec],
    ) -> list[Array]:
        reason = eqn.primitive.name
        return [
            value if before == after else self.completed(value, before, after, reason)
            for value, before, after in zip(results, natural, final, strict=True)
        ]

    def _scan(self, eqn: JaxprEqn, plan: RegionPlan, operands: list[Array]) -> list[Array]:
        num_consts, num_carry, _ = compat.scan_counts(eqn)
        first_x = num_consts + num_carry
        (body,) = plan.bodies
        unstacked = (*plan.operands[:first_x], *map(_unstacked, plan.operands[first_x:]))
        _check_specs(eqn, "operands", unstacked, body.inputs)
        carried = plan.operands[num_consts:first_x]
        _check_specs(eqn, "carries", carried, body.outputs[:num_carry])
        natural = [*carried, *map(stacked, body.outputs[num_carry:])]
        inner, length = bodies(eqn)[0], eqn.params["length"]
        log = self.collectives.body(max(length, 1))

        def step(
            carry: tuple[Array, ...], xs: tuple[Array, ...]
        ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
            with self.collectives.inside(log):
                outputs = self.bucketed(inner, body, [*operands[:num_consts], *carry, *xs])
            return tuple(outputs[:num_carry]), tuple(outputs[num_carry:])

        carry, ys = lax.scan(
            step,
            tuple(operands[num_consts:first_x]),
            tuple(operands[first_x:]),
            length=length,
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return self._all_completed(eqn, [*carry, *ys], natural, plan.results)

    def _while(self, eqn: JaxprEqn, plan: RegionPlan, operands: list[Array]) -> list[Array]:
        num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test_plan, body_plan = plan.bodies
        carried = plan.operands[num_test + num_body :]
        _check_specs(eqn, "operands", (*plan.operands[:num_test], *carried), test_plan.inputs)
        _check_specs(eqn, "operands", plan.operands[num_test:], body_plan.inputs)
        _check_specs(eqn, "carries", carried, body_plan.outputs)
        _check_specs(eqn, "results", carried, plan.results)
        _check_specs(eqn, "predicate", test_plan.outputs, (ShardingSpec(()),))
        test, body = bodies(eqn)
        test_consts, body_consts = operands[:num_test], operands[num_test : num_test + num_body]
        logs = self.collectives.body(None), self.collectives.body(None)

        def proceed(carry: tuple[Array, ...]) -> Array:
            with self.collectives.inside(logs[0]):
                return self.run(test, test_plan, [*test_consts, *carry])[0]

        def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            with self.collectives.inside(logs[1]):
                return tuple(self.bucketed(body, body_plan, [*body_consts, *carry]))

        results = lax.while_loop(proceed, step, tuple(operands[num_test + num_body :]))
        return list(results)

    def _cond(self, eqn: JaxprEqn, plan: RegionPlan, operands: list[Array]) -> list[Array]:
        branches = []
        for body, closed in zip(plan.bodies, bodies(eqn), strict=True):
            _check_specs(eqn, "operands", plan.operands[1:], body.inputs)
            _check_specs(eqn, "results", plan.results, body.outputs)
            branches.append(self._branch(closed, body))
        which = jnp.asarray(operands[0])
        if which.dtype == np.bool_:
            which = which.astype(np.int32)
        return list(lax.switch(which, branches, *operands[1:]))

    def _branch(self, closed: ClosedJaxpr, plan: JaxprPlan) -> Function[tuple[Array, ...]]:
        log = self.collectives.body(1)

        def branch(*values: Array) -> tuple[Array, ...]:
            with self.collectives.inside(log):
                return tuple(self.bucketed(closed, plan, values))

        return branch


@frozen(eq=False)
class _OnDevice(Walk):
    """Runs each operator on one device's parts, with explicit collectives between them."""

    conversions: Conversions = field(kw_only=True)

    def operator(self, eqn: JaxprEqn, strategy: Strategy, operands: Sequence[Array]) -> list[Array]:
        rule, name = sharding_rule(eqn), eqn.primitive.name
        if compat.calls_back(eqn) and self.mesh.num_devices > 1:
            return self._on_first(eqn, operands)
        natural = run_local(eqn, operands, strategy, self.mesh, self.collectives)
        if rule is None:
            return natural
        return [
            value
            if compat.is_drop(var)
            else complete(value, rule, strategy, k, self.collectives, name)
            for k, (var, value) in enumerate(zip(eqn.outvars, natural, strict=True))
        ]

    def _on_first(self, eqn: JaxprEqn, operands: Sequence[Array]) -> list[Array]:
        """Call back from the mesh's first device alone and send what comes back to the others."""
        axes = tuple(axis.name for axis in self.mesh.axes)
        results = lax.cond(
            self.collectives.index(axes) == 0,
            lambda *values: compat.bind(eqn, values),
            lambda *values: [jnp.zeros(shape_of(var), dtype_of(var)) for var in eqn.outvars],
            *operands,
        )
        return [self._sent_by_first(value, axes, eqn.primitive.name) for value in results]

    def _sent_by_first(self, value: Array, axes: tuple[str, ...], reason: str) -> Array:
        number = value.astype(jnp.int8) if value.dtype == jnp.bool_ else value
        return self.collectives.all_reduce(number, axes, "add", reason).astype(value.dtype)

    def completed(
        self, value: Array, natural: ShardingSpec, final: ShardingSpec, reason: str
    ) -> Array:
        return complete_sums(value, natural, final, self.collectives, reason)

    def convert(
        self, value: Array, atom: Atom, source: ShardingSpec, target: ShardingSpec, reason: str
    ) -> Array:
        return convert(
            value, shape_of(atom), source, target, self.conversions, self.collectives, reason
        )


def _literal(atom: Literal) -> Array:
    """Return the value of a literal, with the type the equation was traced with."""
    return cast(Array, np.asarray(atom.val, dtype=dtype_of(atom)))  # taken wherever an Array is


def _unstacked(spec: ShardingSpec) -> ShardingSpec:
    """Return the spec of one slice of a stacked value."""
    if spec.dims[0]:
        raise ValueError(f"the leading dim of a scanned value must not be sharded, got {spec}")
    return ShardingSpec(spec.dims[1:], spec.partial)


def _check_length(what: str, planned: Sequence[object], actual: Sequence[object]) -> None:
    if len(planned) != len(actual):
        raise ValueError(
            f"the plan has {len(planned)} {what}, the jaxpr has {len(actual)}; was the plan made "
            "for this jaxpr, inlined?"
        )


def _check_specs(
    eqn: JaxprEqn, what: str, outside: Sequence[ShardingSpec], inside: Sequence[ShardingSpec]
) -> None:
    for k, (one, other) in enumerate(zip(outside, inside, strict=True)):
        if one != other:
            raise ValueError(
                f"{what} of a {eqn.primitive.name!r} region must have one spec outside and inside: "
                f"number {k} is {one} outside and {other} inside"
            )
