"""Reads and writes at one known place become slices and joins; results stay."""

from __future__ import annotations

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.step.trace import trace

X = jnp.arange(3 * 5 * 2.0).reshape(3, 5, 2)
Y = -jnp.ones((3, 2))


def _both(function):
    return lambda x, y: jax.vjp(function, x, y)[1](function(x, y) ** 2)


PROGRAMS = {
    "set": lambda x, y: x.at[:, 0].set(y),
    "set_in_a_row": lambda x, y: x.at[:, 1:4].set(y[:, None]),
    "add": lambda x, y: x.at[:, -1].add(y),
    "add_to_a_block": lambda x, y: x.at[1, 2].add(y[0]),
    "taken": lambda x, y: lax.dynamic_slice(x, (1, 4, 0), (2, 3, 2)) + y[0],  # from 2 on, the last
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("made", [lambda function: function, _both], ids=["value", "gradients"])
def test_what_is_written_at_a_known_place_is_cut_and_joined(name, made):
    function = made(PROGRAMS[name])
    program, _ = trace(function, X, Y)
    names = {eqn.primitive.name for eqn in program.jaxpr.eqns}
    assert not names & {"gather", "scatter", "scatter-add", "dynamic_slice"}
    found = jax.extend.core.jaxpr_as_fun(program)(X, Y)
    for one, two in zip(found, jax.tree.leaves(function(X, Y)), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.at[:, 7].set(y),  # dropped
        lambda x, y: x.at[:, y[0, 0].astype(int)].set(y),
        lambda x, y: x.at[jnp.array([0, 2])].add(y[:2, None]),
    ],
)
def test_other_places_are_left_as_they_are(function):
    program, _ = trace(function, X, Y)
    assert any(eqn.primitive.name.startswith("scatter") for eqn in program.jaxpr.eqns)
