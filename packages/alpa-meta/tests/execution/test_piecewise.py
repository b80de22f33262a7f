"""Arrays in pieces behave like the array they are pieces of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_meta.execution.piecewise import Piece, PiecewiseArray, StateArray, gathered

WHOLE = np.arange(30, dtype=np.float32).reshape(5, 6)


@pytest.fixture
def array():
    """Return WHOLE as pieces of two and three rows."""
    return PiecewiseArray([jnp.asarray(WHOLE[:2]), jnp.asarray(WHOLE[2:])], (0, 2, 5))


def test_it_has_the_shape_and_dtype_of_the_whole(array):
    assert (array.shape, array.dtype, array.ndim, array.size) == ((5, 6), np.float32, 2, 30)
    assert (len(array), array.nbytes) == (5, 120)
    assert repr(array) == "PiecewiseArray(float32[5, 6], cut at [2])"
    assert not array.is_deleted()
    assert array.block_until_ready() is array


def test_it_turns_into_the_whole_where_it_is_asked_to(array):
    for whole in (np.asarray(array), jnp.asarray(array), jax.device_get(array), array[:]):
        assert np.array_equal(whole, WHOLE)
    assert np.asarray(array, np.int32).dtype == np.int32
    assert np.array_equal(gathered({"w": array})["w"], WHOLE)
    assert np.array_equal(jnp.sum(jnp.asarray(array)), WHOLE.sum())


def test_it_is_one_leaf_of_a_tree(array):
    assert jax.tree.leaves({"w": array}) == [array]


def test_its_layers_are_a_piece_or_taken_from_several(array):
    assert array.layers(2, 5) is array.pieces[1]
    assert np.array_equal(array.layers(1, 4), WHOLE[1:4])


def test_keys_in_pieces_stay_keys():
    keys = jax.random.split(jax.random.key(0), 3)
    whole = PiecewiseArray([keys[:1], keys[1:]], (0, 1, 3)).whole()
    assert np.array_equal(jax.random.key_data(whole), jax.random.key_data(keys))


def test_pieces_must_fill_their_bounds(array):
    with pytest.raises(ValueError, match=r"pieces of \[2, 3\] layers must fill the bounds"):
        PiecewiseArray(array.pieces, (0, 3, 5))


def test_a_state_array_is_put_together_from_its_pieces():
    wanted = StateArray((Piece("w[0:2]", 0, 2), Piece("w[2:5]", 2, 5)))
    pieces = [piece.of(WHOLE) for piece in wanted.pieces]
    assert [len(piece) for piece in pieces] == [2, 3]
    assert np.array_equal(np.asarray(wanted.united(pieces)), WHOLE)
    assert StateArray((Piece("w"),)).united([wanted.united(pieces)]).shape == (5, 6)
