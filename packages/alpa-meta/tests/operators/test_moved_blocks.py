"""Cuts that move whole blocks along a dim, on parts of each block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.compat import open_jaxpr
from alpa_meta.operators.cutting import moved_blocks, params_of_parts

SIZE, COUNT = 6, 3
X, Y = np.arange(24.0).reshape(12, 2), -np.arange(12.0).reshape(6, 2)  # two blocks, and one

MOVES = {
    "joined": (lambda x, y: lax.concatenate([x, y, x], 0), [5]),
    "the second": (lambda x, y: lax.slice_in_dim(x, 6, 12), [1]),
    "the second, of one column": (lambda x, y: lax.slice(x, (6, 0), (12, 1)), [1]),
    "in parts": (lambda x, y: lax.split(x, (6, 6)), [1, 1]),
    "padded": (lambda x, y: lax.pad(x, 0.0, ((6, 12, 0), (1, 0, 0))), [5]),
    "padded with less": (lambda x, y: lax.pad(x, 0.0, ((-6, 6, 0), (0, 0, 0))), [2]),
}
OPERANDS = {"joined": (X, Y, X), "padded": (X, 0.0), "padded with less": (X, 0.0)}
OTHERS = {
    "half of a block": lambda x, y: lax.slice_in_dim(x, 3, 9),
    "every second": lambda x, y: lax.slice_in_dim(x, 0, 12, 2),
    "between": lambda x, y: lax.pad(y, 0.0, ((0, 1, 1), (0, 0, 0))),
    "with a row more": lambda x, y: lax.concatenate([x, y[:1]], 0),
    "along the other dim": lambda x, y: lax.concatenate([x, x], 1),
    "the other way": lambda x, y: lax.rev(x, (0,)),
}


def _equation(function):
    return open_jaxpr(jax.make_jaxpr(function)(X, Y)).eqns[-1]


def _part(value, number):
    blocks = np.asarray(value).reshape(-1, SIZE, *np.shape(value)[1:])
    own = SIZE // COUNT
    part = blocks[:, number * own : (number + 1) * own]
    return part.reshape(-1, *np.shape(value)[1:])


@pytest.mark.parametrize("name", MOVES)
def test_a_part_of_each_block_moves_as_the_block_does(name):
    function, counts = MOVES[name]
    eqn = _equation(function)
    assert moved_blocks(eqn, 0, SIZE) == counts
    params = params_of_parts(eqn, 0, COUNT)
    operands = OPERANDS.get(name, (X,))
    whole = jax.tree.leaves(function(X, Y))
    for number in range(COUNT):
        parts = [_part(one, number) if np.ndim(one) else jnp.float32(one) for one in operands]
        found = eqn.primitive.bind(*map(jnp.asarray, parts), **params)
        for one, expected in zip(jax.tree.leaves(found), whole, strict=True):
            np.testing.assert_array_equal(one, _part(expected, number))


@pytest.mark.parametrize("name", OTHERS)
def test_what_moves_no_whole_blocks_is_told(name):
    assert moved_blocks(_equation(OTHERS[name]), 0, SIZE) is None
