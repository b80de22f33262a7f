"""Equal layers share their choice."""

import jax
import jax.numpy as jnp

from alpa_meta.compat import Var
from alpa_meta.intra_op.folding import eqn_signature, fold_keys, layer_classes
from alpa_meta.passes.shared_reads import read_once


def layers_of(widths):
    """Return the equations of a chain of products with their phases and layers."""

    def chain(x, weights):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    weights = [jnp.ones((n, m)) for n, m in zip(widths, widths[1:])]
    eqns = jax.make_jaxpr(chain)(jnp.ones((2, widths[0])), weights).jaxpr.eqns
    layers, layer = [], -1
    for eqn in eqns:
        layer += eqn.primitive.name == "dot_general"
        layers.append(layer)
    return eqns, ["forward"] * len(eqns), layers


def test_layers_of_equal_shapes_have_equal_keys_place_by_place():
    eqns, phases, layers = layers_of([4, 4, 4, 4])
    keys = fold_keys(eqns, phases, layers)
    assert keys[:2] == keys[2:4] == keys[4:6]
    assert len(set(keys)) == 2
    assert layer_classes(keys, layers, 3) == [0, 0, 0]


def test_layers_of_other_shapes_or_phases_are_of_another_class():
    eqns, phases, layers = layers_of([4, 4, 8, 8, 4])
    keys = fold_keys(eqns, phases, layers)
    assert layer_classes(keys, layers, 4) == [0, 1, 2, 3]
    eqns, phases, layers = layers_of([4, 4, 4])
    phases[-1] = "backward"
    assert layer_classes(fold_keys(eqns, phases, layers), layers, 2) == [0, 1]


def test_layers_without_equations_are_like_no_other():
    eqns, phases, layers = layers_of([4, 4, 4])
    layers = [layer + 2 for layer in layers]
    assert layer_classes(fold_keys(eqns, phases, layers), layers, 4) == [1, 1, 0, 0]


def test_equations_without_a_layer_stand_alone():
    eqns, phases, layers = layers_of([4, 4])
    assert fold_keys(eqns, phases, [None] * len(layers)) == [None] * len(eqns)


def test_loops_are_told_apart_by_their_bodies_and_lengths():
    def signature(function, length):
        closed = jax.make_jaxpr(
            lambda x: jax.lax.scan(lambda c, _: (function(c), None), x, None, length)[0]
        )(1.0)
        return eqn_signature(closed.jaxpr.eqns[0])

    assert signature(jnp.sin, 3) == signature(jnp.sin, 3)
    assert signature(jnp.sin, 3) != signature(jnp.sin, 4)
    assert signature(jnp.sin, 3) != signature(jnp.cos, 3)


def test_a_value_read_for_other_layers_is_in_its_place_wherever_the_first_reader_is():
    def chain(x, weights):
        notes = []
        for weight in weights:
            x = jnp.tanh(x @ weight)
            notes.append(jnp.sin(weight))
        return x, notes

    eqns = jax.make_jaxpr(chain)(jnp.ones((2, 4)), [jnp.ones((4, 4))] * 2).jaxpr.eqns
    found, layers = [], []
    for layer in range(2):
        product, tanh, note = eqns[3 * layer : 3 * layer + 3]
        (made,) = tanh.outvars
        read = read_once(made, Var(made.aval), product)
        found += [product, tanh, *((read, note) if layer else (note, read))]
        layers += [layer] * 4
    keys = fold_keys(found, ["forward"] * 8, layers)
    assert layer_classes(keys, layers, 2) == [0, 0]
    assert keys[3] == keys[6]
