"""Random plans, for tests: a program must be right whatever its plan."""

from __future__ import annotations

import functools
import random
from collections.abc import Collection, Sequence

import jax.numpy as jnp
from attrs import frozen

from alpa_interchange import LogicalMesh, ShardingRule, ShardingSpec, Strategy
from alpa_meta import compat
from alpa_meta.compat import Atom, ClosedJaxpr, JaxprEqn, Var, dtype_of, shape_of
from alpa_meta.operators import linear_operands, sharding_rule
from alpa_meta.operators.regions import bodies, fold, is_region
from alpa_meta.spmd.plan import JaxprPlan, RegionPlan, stacked
from ilp_sharding.strategies import (
    StrategyOptions,
    completed_specs,
    enumerate_strategies,
    sharding_specs,
)


def random_plan(closed: ClosedJaxpr, mesh: LogicalMesh, seed: int) -> JaxprPlan:
    """Return a plan of `closed` with random strategies and random specs at its border."""
    draw = _Draw(mesh, random.Random(seed))
    jaxpr = compat.open_jaxpr(closed)
    return draw.plan(closed, draw.specs(jaxpr.invars), draw.specs(jaxpr.outvars))


@functools.lru_cache(maxsize=4096)
def _strategies(
    rule: ShardingRule, mesh: LogicalMesh, options: StrategyOptions
) -> tuple[Strategy, ...]:
    return enumerate_strategies(rule, mesh, options)


@frozen
class _Draw:
    mesh: LogicalMesh
    random: random.Random

    def specs(self, atoms: Sequence[Atom]) -> tuple[ShardingSpec, ...]:
        return tuple(self.spec(shape_of(atom)) for atom in atoms)

    def spec(self, shape: tuple[int, ...]) -> ShardingSpec:
        return self.random.choice(sharding_specs(shape, self.mesh))

    def plan(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[ShardingSpec],
        outputs: Sequence[ShardingSpec],
        leaving: Collection[int] = (),
    ) -> JaxprPlan:
        """Return a plan; the outputs numbered in `leaving` may be sums as they arise."""
        jaxpr = compat.open_jaxpr(closed)
        specs: dict[Var, ShardingSpec] = dict(zip(jaxpr.invars, inputs, strict=True))
        specs.update((v, ShardingSpec.replicated(len(shape_of(v)))) for v in jaxpr.constvars)
        steps: list[Strategy | RegionPlan] = []
        for eqn in jaxpr.eqns:
            if is_region(eqn):
                steps.append(self.region(eqn))
            else:
                steps.append(self.strategy(eqn, specs))
            specs.update(zip(eqn.outvars, steps[-1].results, strict=True))
        last = list(outputs)
        for number in leaving:
            atom = jaxpr.outvars[number]
            if not isinstance(atom, compat.Literal) and specs[atom].partial:
                last[number] = self.random.choice([specs[atom], outputs[number]])
        return JaxprPlan(tuple(inputs), tuple(steps), tuple(last))

    def strategy(self, eqn: JaxprEqn, specs: dict[Var, ShardingSpec]) -> Strategy:
        rule = sharding_rule(eqn)
        if rule is None:
            return Strategy(
                assignment=(),
                operands=tuple(ShardingSpec.replicated(len(shape_of(a))) for a in eqn.invars),
                results=tuple(ShardingSpec.replicated(len(shape_of(v))) for v in eqn.outvars),
            )
        options = StrategyOptions(
            partial_results=(True,) * len(eqn.outvars), pass_partial=linear_operands(eqn)
        )
        reachable = [
            strategy
            for strategy in _strategies(rule, self.mesh, options)
            if all(
                isinstance(atom, compat.Literal) or set(spec.partial) <= set(specs[atom].partial)
                for atom, spec in zip(eqn.invars, strategy.operands, strict=True)
            )
        ]
        passing = [s for s in reachable if any(spec.partial for spec in s.operands)]
        return self.random.choice(passing if passing and self.random.random() < 0.5 else reachable)

    def region(self, eqn: JaxprEqn) -> RegionPlan:
        operands, results = list(self.specs(eqn.invars)), list(self.specs(eqn.outvars))
        return fold(
            eqn,
            scan=lambda: self._scan(eqn),
            loop=lambda: self._while(eqn, operands),
            branches=lambda: self._cond(eqn, operands, results),
            remat=lambda: self._remat(eqn, operands, results),
        )

    def _cond(
        self, eqn: JaxprEqn, operands: list[ShardingSpec], results: list[ShardingSpec]
    ) -> RegionPlan:
        operands[0] = ShardingSpec(())
        branches = tuple(self.plan(branch, operands[1:], results) for branch in bodies(eqn))
        return RegionPlan(tuple(operands), tuple(results), branches)

    def _remat(
        self, eqn: JaxprEqn, operands: list[ShardingSpec], results: list[ShardingSpec]
    ) -> RegionPlan:
        body = self.plan(bodies(eqn)[0], operands, results, range(len(results)))
        return RegionPlan(tuple(operands), self.completed(eqn, body.outputs), (body,))

    def summed(self, atom: Atom, spec: ShardingSpec) -> ShardingSpec:
        """Return `spec`, or that of an unreduced sum over an axis that it does not use."""
        used = {axis for dim in spec.dims for axis in dim}
        idle = [axis.name for axis in self.mesh.axes if axis.size > 1 and axis.name not in used]
        numbers = shape_of(atom) and jnp.issubdtype(dtype_of(atom), jnp.number)
        if not idle or not numbers or self.random.random() < 0.5:
            return spec
        return ShardingSpec(spec.dims, (self.random.choice(idle),))

    def completed(self, eqn: JaxprEqn, natural: Sequence[ShardingSpec]) -> tuple[ShardingSpec, ...]:
        """Return the specs of a region's results with some of their sums completed."""
        return tuple(
            self.random.choice(completed_specs(spec, shape_of(var), self.mesh, True))
            for var, spec in zip(eqn.outvars, natural, strict=True)
        )

    def _scan(self, eqn: JaxprEqn) -> RegionPlan:
        num_consts, num_carry, _ = compat.scan_counts(eqn)
        first_x = num_consts + num_carry
        (jaxpr,) = bodies(eqn)
        inner = compat.open_jaxpr(jaxpr)
        inputs, outputs = list(self.specs(inner.invars)), list(self.specs(inner.outvars))
        for number, after in enumerate(inner.outvars[:num_carry]):
            if not any(
                isinstance(a, compat.Literal) for a in (eqn.invars[num_consts + number], after)
            ):
                inputs[num_consts + number] = self.summed(after, inputs[num_consts + number])
        outputs[:num_carry] = inputs[num_consts:first_x]
        operands = inputs[:first_x] + [stacked(spec) for spec in inputs[first_x:]]
        body = self.plan(jaxpr, inputs, outputs, leaving=range(num_carry, len(outputs)))
        natural = [*inputs[num_consts:first_x], *map(stacked, body.outputs[num_carry:])]
        return RegionPlan(tuple(operands), self.completed(eqn, natural), (body,))

    def _while(self, eqn: JaxprEqn, operands: list[ShardingSpec]) -> RegionPlan:
        num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carried = operands[num_test + num_body :]
        test = self.plan(
            bodies(eqn)[0],
            operands[:num_test] + carried,
            [ShardingSpec(())],
        )
        body = self.plan(bodies(eqn)[1], operands[num_test:], carried)
        return RegionPlan(tuple(operands), tuple(carried), (test, body))
