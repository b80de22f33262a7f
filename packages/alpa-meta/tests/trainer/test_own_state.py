"""A user's state in a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from alpa_meta.trainer.checkpoint import CheckpointError, read_checkpoint, save_checkpoint
from alpa_meta.trainer.own_state import restored_state, stored_state


def kept(folder, state):
    save_checkpoint(folder, stored_state(state), step=1, settings={})
    return read_checkpoint(folder)


def test_arrays_keys_and_numbers_come_back_and_functions_are_the_program_s(tmp_path):
    def made(scale):
        weights = jnp.full(3, scale, jnp.bfloat16)
        return {"w": weights, "key": jax.random.key(int(scale)), "rate": scale, "act": jnp.tanh}

    found = restored_state(kept(tmp_path, made(2.0)), made(1.0))
    assert found["w"].dtype == jnp.bfloat16 and found["w"].tolist() == [2.0] * 3
    assert jax.random.key_data(found["key"]).tolist() == [0, 2]
    assert found["rate"] == 2.0 and type(found["rate"]) is float
    assert found["act"] is jnp.tanh


def test_nnx_objects_are_made_anew_with_the_arrays(tmp_path):
    first, second = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (1, 2))
    found = restored_state(kept(tmp_path, first), second)
    assert isinstance(found, nnx.Linear)
    np.testing.assert_array_equal(found.kernel[...], first.kernel[...])


def test_what_differs_is_listed(tmp_path):
    checkpoint = kept(tmp_path, {"w": jnp.ones(3)})
    with pytest.raises(
        CheckpointError, match=r"w.*float32\[3\] in the checkpoint and float32\[4\]"
    ):
        restored_state(checkpoint, {"w": jnp.ones(4)})
