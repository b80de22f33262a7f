"""Steps cut into microbatches, run as the executor runs them, by jax alone."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from alpa_meta.compat import Literal, bind
from alpa_meta.microbatch.placement import REPLICATED
from alpa_meta.step.program import Step


def step_of(loss):
    def step(w, batch):
        value, gradients = jax.value_and_grad(loss)(w, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value

    return step


def in_microbatches(step, count, *args):
    """Return the results of a step's cut program, run as the executor does: statistics, totals,
    microbatches, update."""
    flat = Step(step, args)
    program = flat.program(count)
    assert not program.inexact, program.inexact
    jaxpr = program.jaxpr
    phases = program.phases.of_eqn
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.closed.consts, strict=True))
    leaves = flat.flatten(args)
    given = [] if program.statistics is None else _statistics(program.statistics, leaves)
    numbers = jnp.arange(count, dtype=jnp.int32)
    supply = iter(given)
    for var, leaf in zip(jaxpr.invars[len(leaves) :], program.inputs[len(leaves) :], strict=True):
        if leaf.role == "number":
            values[var] = numbers
        elif leaf.role != "total":
            values[var] = next(supply)
    values.update(zip(jaxpr.invars, leaves, strict=False))
    roles = dict(zip(jaxpr.invars, program.inputs, strict=True))

    def microbatch(number):
        held = dict(values)
        for var, leaf in roles.items():
            if leaf.in_parts:
                size = leaf.aval.shape[0] // count
                held[var] = values[var][number * size : (number + 1) * size]
        _run(jaxpr.eqns, phases, held, lambda phase: phase != "update")
        return held

    if program.totals:
        early = [microbatch(k) for k in range(count)]
        values.update(
            (total, sum(part[value] for part in early)) for total, value in program.totals.items()
        )
    parts = [microbatch(k) for k in range(count)]
    made = {
        var
        for eqn, phase in zip(jaxpr.eqns, phases, strict=True)
        if phase != "update"
        for var in eqn.outvars
    }
    for var in made & parts[0].keys():
        values[var] = _joined(
            [part[var] for part in parts], program.placements.get(var, REPLICATED)
        )
    _run(jaxpr.eqns, phases, values, lambda phase: phase == "update")
    _, spec = flat.traced(None)
    return spec[0].unflatten([values[var] for var in jaxpr.outvars])


def _statistics(statistics, leaves):
    return jaxpr_as_fun(statistics.closed)(*(leaves[k] for k in statistics.inputs))


def _run(eqns, phases, values, chosen):
    for eqn, phase in zip(eqns, phases, strict=True):
        if chosen(phase) and all(isinstance(a, Literal) or a in values for a in eqn.invars):
            read = [a.val if isinstance(a, Literal) else values[a] for a in eqn.invars]
            values.update(zip(eqn.outvars, bind(eqn, read), strict=True))


def _joined(parts, placement):
    if placement.kind == "split":
        return jnp.concatenate(parts, placement.dim)
    if placement.kind == "sum":
        return sum(parts)
    if placement.kind == "extreme":
        stacked = jnp.stack(parts)
        return stacked.max(0) if placement.reduction == "max" else stacked.min(0)
    return parts[0]
