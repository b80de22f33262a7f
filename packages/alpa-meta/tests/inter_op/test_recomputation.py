"""Layers that compute again in their backward pass what they do not keep."""

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.compat import Var, is_drop
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.layering import assign_layers, tensor_bytes
from alpa_meta.inter_op.recomputation import chosen_recomputation, recomputed
from alpa_meta.step.program import Step

SHAPE = jax.ShapeDtypeStruct
DEPTH, WIDTH, BATCH = 3, 4, 8


def layers_up_to_tanh(eqns, inputs):
    """Return one layer per block: a block ends with its tanh."""
    layers, layer = [], 0
    for eqn in eqns:
        layers.append(min(layer, DEPTH - 1))
        layer += eqn.primitive.name == "tanh"
    return layers


def step_of(block):
    def step(weights, batch):
        def loss(weights):
            x = batch
            for weight in weights:
                x = block(weight, x)
            return jnp.mean(x**2)

        return [w - g for w, g in zip(weights, jax.grad(loss)(weights))]

    return step


def layered(block, choice, make=step_of):
    weights = [SHAPE((WIDTH, WIDTH), jnp.float32)] * DEPTH
    program = Step(make(block), (weights, SHAPE((BATCH, WIDTH), jnp.float32))).program(1)
    layering = assign_layers(program, layers_up_to_tanh)
    return layering, recomputed(layering, choice, program)


def block(weight, x):
    return jnp.tanh(jnp.sin(x @ weight) @ weight)


def kept(layering, layer=None):
    """Return what the forward pass keeps for the backward pass (of one layer)."""
    made = {
        var
        for eqn, phase in zip(layering.eqns, layering.phases, strict=True)
        if phase == "forward"
        for var in eqn.outvars
        if not is_drop(var)
    }
    places = zip(layering.eqns, layering.phases, layering.layers, strict=True)
    return {
        atom
        for eqn, phase, home in places
        if phase == "backward" and layer in (None, home)
        for atom in eqn.invars
        if isinstance(atom, Var) and atom in made
    }


def count(layering, name, phase="backward"):
    return sum(
        eqn.primitive.name == name and one == phase
        for eqn, one in zip(layering.eqns, layering.phases, strict=True)
    )


FULL = dict.fromkeys(range(DEPTH), "full")


def test_full_recomputation_keeps_what_layers_hand_on():
    before, after = layered(block, FULL)
    handed = (BATCH * WIDTH * 4.0) * DEPTH  # the last layer hands on what the loss reads
    assert sum(map(tensor_bytes, kept(before))) > 2 * handed
    assert sum(map(tensor_bytes, kept(after))) <= handed
    assert after.recomputation == ("full",) * DEPTH


def test_layers_are_chosen_one_by_one():
    before, after = layered(block, {1: "full"})
    assert kept(after, 0) == kept(before, 0) and kept(after, 2) == kept(before, 2)
    assert len(kept(after, 1)) < len(kept(before, 1))
    assert after.recomputation == ("none", "full", "none")
    before, after = layered(block, dict.fromkeys(range(DEPTH), "none"))
    assert before.eqns == after.eqns


def test_clones_read_behind_a_barrier_that_waits_for_the_cotangent():
    _, after = layered(block, FULL)
    barriers = [
        (eqn, layer)
        for eqn, layer in zip(after.eqns, after.layers, strict=True)
        if eqn.primitive.name == "optimization_barrier"
    ]
    assert [layer for _, layer in barriers] == [2, 1, 0]
    made = {
        var: layer
        for eqn, phase, layer in zip(after.eqns, after.phases, after.layers, strict=True)
        if phase == "backward"
        for var in eqn.outvars
    }
    waits = [[made[a] for a in eqn.invars if a in made] for eqn, _ in barriers]
    assert waits == [[2], [2], [1]]  # of the last layer, what the loss has given by then


def with_saliency(block):
    """Return a step that also gives the slopes of its inputs, by a forward pass of their own."""

    def step(weights, batch):
        def out(x):
            for weight in weights:
                x = block(weight, x)
            return jnp.sum(x**2)

        return step_of(block)(weights, batch), jax.grad(out)(batch)

    return step


@pytest.mark.parametrize("make", [step_of, with_saliency])
@pytest.mark.parametrize("first", ["full", "selective"])
def test_every_value_is_made_before_it_is_read(make, first):
    _, after = layered(block, {0: first, 1: "selective", 2: "full"}, make)
    made = {var for eqn in after.eqns for var in eqn.outvars}
    known: set[Var] = set()
    for eqn in after.eqns:
        assert not (made - known) & {atom for atom in eqn.invars if isinstance(atom, Var)}
        known.update(eqn.outvars)


def test_selective_recomputation_keeps_products_that_are_dear_for_their_size():
    def scored(weight, x):
        """Inner products of length 4, 1 and 8: the second does the least for its 64 results."""
        hidden = x @ weight
        return jnp.tanh(jnp.sin(hidden[:, :1] @ hidden[:, :1].T) @ jnp.sin(hidden))

    def forward_products(kind):
        before, after = layered(scored, dict.fromkeys(range(DEPTH), kind))
        return count(after, "dot_general") - count(before, "dot_general")

    assert forward_products("full") == 2 * DEPTH + 1  # but for the last, results are handed on
    assert forward_products("selective") == DEPTH  # the second ones


def test_effects_happen_once():
    def loud(weight, x):
        x = jnp.sin(x @ weight)
        jax.debug.callback(lambda value: None, x)
        return jnp.tanh(x @ weight)

    before, after = layered(loud, FULL)
    assert count(after, "debug_callback") == count(before, "debug_callback") == 0
    assert count(after, "sin") + count(after, "cos") > count(before, "sin") + count(before, "cos")


def test_layers_that_the_user_recomputes_are_left_as_they_are():
    before, after = layered(jax.checkpoint(block), FULL)
    assert before.eqns == after.eqns


def test_dropout_is_drawn_again_from_a_key_behind_the_barrier():
    def dropped(weight, x):
        key = jax.random.wrap_key_data(x[0, :2].astype(jnp.uint32))
        drawn = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.tanh(jnp.where(drawn, jnp.sin(x @ weight), 0) @ weight)

    before, after = layered(dropped, FULL)
    assert count(after, "random_bits") == count(before, "random_bits", "forward")
    assert all(str(var.aval.dtype) != "bool" for var in kept(after))


def test_layers_that_are_named_must_exist():
    assert chosen_recomputation(None, 2) == {0: "none", 1: "none"}
    assert chosen_recomputation("full", 2) == {0: "full", 1: "full"}
    assert chosen_recomputation(("none", "full"), 2) == {0: "none", 1: "full"}
    assert chosen_recomputation({1: "selective"}, 2) == {0: "none", 1: "selective"}
    with pytest.raises(PlanError, match="names 3 layers, but .* cut into 2"):
        chosen_recomputation(("full",) * 3, 2)
    with pytest.raises(PlanError, match="names layer 2, but .* cut into 2 layers"):
        chosen_recomputation({2: "full"}, 2)
