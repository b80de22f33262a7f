"""The arrays among a call's arguments: which leaves they are, their paths, the call again."""

import jax
import jax.numpy as jnp
import numpy as np

from alpa_meta.step.arguments import abstract_leaf, argument_names, flat_arguments, is_array

ARGS = ({"f": jnp.tanh, "w": np.ones((2, 3))}, "mean", 0.5)


def test_arrays_and_numbers_are_arrays_and_other_leaves_are_not():
    leaves = (jnp.tanh, 1, 2.0, np.ones(2), "no", None)
    assert [is_array(leaf) for leaf in leaves] == [False, True, True, True, False, False]


def test_arrays_have_the_path_of_their_argument():
    def step(state, kind, rate):
        return state

    found = flat_arguments(ARGS, static_argnums=(1,))
    names = [name for name, _ in found.named_arrays(argument_names(step, 3))]
    assert names == ["state['w']", "rate"]
    assert argument_names(step, 4)[3] == "arg3"


def test_a_call_is_rebuilt_around_other_arrays():
    found = flat_arguments(ARGS, static_argnums=(1,))
    assert found.call_with([7, 8]) == [{"f": jnp.tanh, "w": 7}, "mean", 8]


def test_calls_that_differ_in_anything_but_arrays_differ_in_structure():
    def structure(*args):
        return flat_arguments(args, static_argnums=(1,)).treedef

    same = ({"f": jnp.tanh, "w": np.zeros(5)}, "mean", 1)
    assert structure(*ARGS) == structure(*same)
    assert structure(*ARGS) != structure({**ARGS[0], "f": jnp.sin}, *ARGS[1:])
    assert structure(*ARGS) != structure(ARGS[0], "sum", ARGS[2])


def test_a_number_has_a_shape_and_a_dtype():
    assert abstract_leaf(0.5) == jax.ShapeDtypeStruct((), jnp.float32)
