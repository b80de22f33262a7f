"""Layers: forward by clustering, backward and update by data flow, constants cloned."""

from collections import Counter

import jax
import jax.numpy as jnp

from alpa_meta.compat import Var, shape_of
from alpa_meta.inter_op.layering import assign_layers, clone_into_readers, tensor_bytes
from alpa_meta.step.program import Step

SHAPE = jax.ShapeDtypeStruct
DEPTH = 3


def step(weights, batch):
    def loss(weights):
        x = batch
        for weight in weights:
            x = jnp.tanh(x @ weight) * jnp.arange(4.0)
        return jnp.mean(x**2)

    gradients = jax.grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients)]


def by_weights(eqns, inputs):
    """Return one layer per matrix product."""
    layers, layer = [], -1
    for eqn in eqns:
        layer += eqn.primitive.name == "dot_general"
        layers.append(max(layer, 0))
    return layers


def layering():
    weights = [SHAPE((4, 4), jnp.float32)] * DEPTH
    program = Step(step, (weights, SHAPE((8, 4), jnp.float32))).program(1)
    return program, assign_layers(program, by_weights)


def test_each_weight_belongs_to_the_layer_that_multiplies_with_it():
    _, found = layering()
    assert found.num_layers == DEPTH
    assert found.input_layers[:DEPTH] == tuple(frozenset({k}) for k in range(DEPTH))


def test_the_backward_pass_goes_down_the_layers():
    _, found = layering()
    products = [
        (phase, layer)
        for eqn, phase, layer in zip(found.eqns, found.phases, found.layers, strict=True)
        if eqn.primitive.name == "dot_general"
    ]
    assert [layer for phase, layer in products if phase == "forward"] == [0, 1, 2]
    backward = [layer for phase, layer in products if phase == "backward"]
    assert backward == sorted(backward, reverse=True)
    assert set(backward) == {0, 1, 2}


def test_the_update_follows_its_parameters():
    program, found = layering()
    layer_of = {
        var: layer
        for eqn, layer in zip(found.eqns, found.layers, strict=True)
        for var in eqn.outvars
    }
    assert [layer_of[var] for var in program.jaxpr.outvars] == [0, 1, 2]


def test_values_of_no_input_are_computed_by_every_layer_that_reads_them():
    _, found = layering()
    homes = {
        layer
        for eqn, layer in zip(found.eqns, found.layers, strict=True)
        if eqn.primitive.name == "iota"
    }
    assert homes == {0, 1, 2}


def test_clones_define_variables_of_their_own():
    closed = jax.make_jaxpr(lambda x: (jnp.arange(3.0) + x, jnp.arange(3.0) * x))(1.0)
    eqns = closed.jaxpr.eqns
    iotas = {k for k, eqn in enumerate(eqns) if eqn.primitive.name == "iota"}
    labels = list(range(len(eqns)))
    copies, kept = clone_into_readers(eqns, labels, iotas, closed.jaxpr.outvars, -1)
    defined = [var for eqn in copies for var in eqn.outvars]
    assert len(set(defined)) == len(defined) == len(kept)


def test_a_key_counts_a_few_bytes():
    jaxpr = jax.make_jaxpr(lambda key, x: (key, x))(jax.random.key(0), jnp.ones((2, 3))).jaxpr
    assert [tensor_bytes(var) for var in jaxpr.invars] == [8.0, 24.0]


def test_weights_that_meet_one_memory_have_their_gradients_in_their_own_layers():
    """As cross attention's do: all of them were where the backward pass reads the memory first."""

    def step(weights, batch):
        def loss(weights):
            memory = x = jnp.tanh(batch @ weights[0])
            for own, other in zip(weights[1::2], weights[2::2]):
                x = jnp.tanh(x @ own + memory @ other)
            return jnp.mean(x**2)

        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights))]

    def by_pairs(eqns, inputs):
        products = [eqn.primitive.name == "dot_general" for eqn in eqns]
        return [max(0, sum(products[: k + 1])) // 2 for k in range(len(eqns))]

    weights = [SHAPE((4, 4), jnp.float32)] * (1 + 2 * DEPTH)
    program = Step(step, (weights, SHAPE((8, 4), jnp.float32))).program(1)
    found = assign_layers(program, by_pairs)
    assert found.num_layers == 1 + DEPTH
    expected = [0, *(1 + k // 2 for k in range(2 * DEPTH))]
    assert found.input_layers[: len(weights)] == tuple(frozenset({k}) for k in expected)
    products = Counter(
        layer
        for eqn, phase, layer in zip(found.eqns, found.phases, found.layers, strict=True)
        if eqn.primitive.name == "dot_general" and phase == "backward"
    )
    assert products == {0: 1, 1: 4, 2: 4, 3: 4}  # gradients of weights, and of what they meet
    made = set(program.jaxpr.invars)  # in an order that can run
    for eqn in found.eqns:
        assert all(isinstance(a, jax.extend.core.Literal) or a in made for a in eqn.invars)
        made.update(eqn.outvars)


def test_a_tied_weight_is_transposed_by_the_layer_that_reads_it_so():
    """The first layer transposed it, for each microbatch, and sent it to the last."""

    def step(weights, batch):
        def loss(weights):
            x = batch @ weights[0]
            for weight in weights[1:]:
                x = jnp.tanh(x @ weight)
            return jnp.mean((x @ weights[0].T) ** 2)

        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights))]

    def by_head(eqns, inputs):
        """Return layers whose first ends behind the transposition."""
        at = max(k for k, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general")
        return [int(k >= at) for k in range(len(eqns))]

    weights = [SHAPE((6, 4), jnp.float32), *[SHAPE((4, 4), jnp.float32)] * DEPTH]
    program = Step(step, (weights, SHAPE((8, 6), jnp.float32))).program(1)
    found = assign_layers(program, by_head)
    assert found.input_layers[0] == {0, 1}
    made = {var: k for k, eqn in enumerate(found.eqns) for var in eqn.outvars}
    (head,) = (
        eqn
        for eqn, phase, layer in zip(found.eqns, found.phases, found.layers, strict=True)
        if (phase, layer, eqn.primitive.name) == ("forward", 1, "dot_general")
    )
    (transposed,) = (made[a] for a in head.invars if isinstance(a, Var) and shape_of(a) == (4, 6))
    assert (found.phases[transposed], found.layers[transposed]) == ("forward", 1)
    back = [
        layer
        for eqn, phase, layer in zip(found.eqns, found.phases, found.layers, strict=True)
        if phase == "backward" and found.eqns[transposed].outvars[0] in eqn.invars
    ]
    assert back == [1]  # of the copy of the forward pass
