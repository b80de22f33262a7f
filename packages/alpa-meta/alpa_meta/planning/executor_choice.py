"""Which executor runs a stage: shard_map, or sharding constraints where it would only gather.

Inside shard_map an operator without a sharding rule runs replicated, on gathered operands. If the
operator is in no table at all (a user's own primitive), XLA may know how to partition it; the
constraint executor leaves that to it, for the whole stage. What lowers to a custom call (pallas,
ffi, callbacks) XLA cannot partition either: it stays in shard_map, and so does an operator that
runs on whole operands anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import jax
from attrs import evolve

from alpa_interchange import ParallelPlan, ShardingSpec, Strategy
from alpa_meta import compat
from alpa_meta.compat import Atom, JaxprEqn, dtype_of, shape_of
from alpa_meta.operators import is_known, sharding_rule
from alpa_meta.operators.regions import bodies, is_region
from alpa_meta.program_caches import cached_by_program
from alpa_meta.spmd import RegionPlan


def chosen_executor(
    wanted: str,
    eqns: Sequence[JaxprEqn],
    steps: Iterable[Strategy | RegionPlan],
    inputs: Mapping[Atom, ShardingSpec],
) -> tuple[str, tuple[str, ...]]:
    """Return the executor of a stage, and the operators that it leaves to XLA's partitioner.

    `wanted` is `Options.executor`; the others are those of `gathered_operators`.
    """
    if wanted == "shard_map":
        return wanted, ()
    found = gathered_operators(eqns, steps, inputs)
    return ("constraint" if found or wanted == "constraint" else "shard_map"), found


def with_executor(plan: ParallelPlan, wanted: str) -> ParallelPlan:
    """Return a finished plan run by the executor `wanted`; "auto": by those it was made for."""
    if wanted == "auto":
        return plan
    shardings = (evolve(one, executor=wanted) for one in plan.shardings)
    return evolve(plan, shardings=tuple(shardings))


def gathered_operators(
    eqns: Sequence[JaxprEqn],
    steps: Iterable[Strategy | RegionPlan],
    inputs: Mapping[Atom, ShardingSpec],
) -> tuple[str, ...]:
    """Return the primitives XLA might partition that the plan runs replicated at a price.

    Such an operator has no sharding rule, and either an operand that is not whole before, or a
    result that is read in parts. `steps` are how `eqns` run, `inputs` the specs of what they read.
    """
    if not any(map(_partitionable_inside, eqns)):
        return ()
    found: dict[str, None] = {}
    _note(eqns, steps, dict(inputs), found)
    return tuple(found)


def _note(
    eqns: Sequence[JaxprEqn],
    steps: Iterable[Strategy | RegionPlan],
    specs: dict[Atom, ShardingSpec],
    found: dict[str, None],
) -> None:
    makers: dict[Atom, str] = {}
    for eqn, step in zip(eqns, steps, strict=True):
        free = _partitionable(eqn)
        for atom, spec in zip(eqn.invars, step.operands, strict=True):
            if isinstance(atom, compat.Literal):
                continue
            if free and _divided(specs.get(atom, spec)):
                found[eqn.primitive.name] = None
            elif atom in makers and _divided(spec):
                found[makers[atom]] = None
        if isinstance(step, RegionPlan):
            for body, plan in zip(bodies(eqn), step.bodies, strict=True):
                jaxpr = compat.open_jaxpr(body)
                given: dict[Atom, ShardingSpec] = dict(zip(jaxpr.invars, plan.inputs, strict=True))
                _note(jaxpr.eqns, plan.strategies, given, found)
        for var, spec in zip(eqn.outvars, step.results, strict=True):
            specs[var] = spec
            if free:
                makers[var] = eqn.primitive.name


def _divided(spec: ShardingSpec) -> bool:
    return bool(spec.partial) or any(spec.dims)


def _partitionable_inside(eqn: JaxprEqn) -> bool:
    return _partitionable(eqn) or any(
        _partitionable_inside(inner)
        for body in bodies(eqn)
        for inner in compat.open_jaxpr(body).eqns
    )


def _partitionable(eqn: JaxprEqn) -> bool:
    """Return whether XLA may partition `eqn`, an operator of no table and without a rule."""
    if is_region(eqn) or sharding_rule(eqn) is not None:
        return False
    return not is_known(eqn) and _lowers_without_custom_call(eqn)


@cached_by_program(1024)
def _lowers_without_custom_call(eqn: JaxprEqn) -> bool:
    shapes = [jax.ShapeDtypeStruct(shape_of(atom), dtype_of(atom)) for atom in eqn.invars]
    try:
        text = jax.jit(lambda *values: compat.bind(eqn, values)).lower(*shapes).as_text()
    except Exception:  # a primitive may refuse to lower for this platform in any way it likes
        return False
    return "custom_call" not in text
