"""Stages: shared gradients summed in the update, scalars placed once, levels of the update."""

import jax
import jax.numpy as jnp

from alpa_meta.inter_op.layering import assign_layers
from alpa_meta.inter_op.staging import HUB, assign_stages
from alpa_meta.step.program import Step

SHAPE = jax.ShapeDtypeStruct
WEIGHT, BATCH = SHAPE((4, 4), jnp.float32), SHAPE((6, 4), jnp.float32)


def by_products(eqns, inputs):
    layers, layer = [], -1
    for eqn in eqns:
        layer += eqn.primitive.name == "dot_general"
        layers.append(max(layer, 0))
    return layers


def staged(step, state, num_stages, num_microbatches=2):
    program = Step(step, (state, BATCH)).program(num_microbatches)
    layering = assign_layers(program, by_products)
    cuts = list(range(1, num_stages))
    return program, assign_stages(layering, cuts, program.jaxpr.outvars)


def tied(weight, batch):
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(batch @ w) @ w) ** 2))(weight)
    return weight - gradient


def clipped(state, batch):
    weights, rate = state

    def loss(weights):
        x = batch
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    gradients = jax.grad(loss)(weights)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
    scale = rate * jnp.minimum(1.0, 1.0 / norm)
    return ([w - scale * g for w, g in zip(weights, gradients)], rate * 0.9)


CLIPPED = ([WEIGHT] * 3, SHAPE((), jnp.float32))


def test_every_equation_has_a_stage_below_their_number():
    _, staging = staged(clipped, CLIPPED, 3)
    assert staging.num_stages == 3
    assert set(staging.stages) == {0, 1, 2}


def test_gradients_of_a_tied_weight_are_added_in_the_update():
    _, staging = staged(tied, WEIGHT, 2)
    adding = [
        (eqn, phase)
        for eqn, phase in zip(staging.eqns, staging.phases, strict=True)
        if eqn.primitive.name == "add_any" and eqn.outvars[0].aval.shape == (4, 4)
    ]
    assert [phase for _, phase in adding] == ["update"]
    (eqn, _) = adding[0]
    home = {
        var: stage
        for other, stage in zip(staging.eqns, staging.stages, strict=True)
        for var in other.outvars
    }
    assert {home[atom] for atom in eqn.invars} == {0, 1}


def test_in_one_stage_they_are_added_where_they_are_made():
    _, staging = staged(tied, WEIGHT, 1)
    phases = {
        phase
        for eqn, phase in zip(staging.eqns, staging.phases, strict=True)
        if eqn.primitive.name == "add_any"
    }
    assert phases == {"backward"}


def test_the_global_norm_is_computed_by_one_stage_and_read_a_level_later():
    _, staging = staged(clipped, CLIPPED, 3)
    (root,) = [k for k, eqn in enumerate(staging.eqns) if eqn.primitive.name == "sqrt"]
    assert staging.stages[root] == HUB
    norm = staging.eqns[root].outvars[0]
    assert staging.levels[root] >= 1
    elsewhere = [
        level
        for eqn, stage, level in zip(staging.eqns, staging.stages, staging.levels, strict=True)
        if stage != HUB and any(atom is norm for atom in eqn.invars)
    ]
    assert all(level > staging.levels[root] for level in elsewhere)
    assert max(staging.levels) > staging.levels[root]


def test_scalars_of_no_stage_are_computed_by_every_stage_that_reads_them():
    def decayed(state, batch):
        weights, count = state
        (updated, _) = clipped((weights, 0.1 / (1.0 + count)), batch)
        return updated, count + 1

    program, staging = staged(decayed, CLIPPED, 3)
    count = program.jaxpr.invars[3]
    readers = {
        stage
        for eqn, stage in zip(staging.eqns, staging.stages, strict=True)
        if any(atom is count for atom in eqn.invars)
    }
    assert readers == {0}


def test_variables_are_defined_before_they_are_read_and_once():
    for num_stages in (1, 2, 3):
        program, staging = staged(clipped, CLIPPED, num_stages)
        known = {*program.jaxpr.invars, *program.jaxpr.constvars}
        for eqn in staging.eqns:
            assert all(hasattr(atom, "val") or atom in known for atom in eqn.invars)
            assert not known & set(eqn.outvars)
            known.update(eqn.outvars)
