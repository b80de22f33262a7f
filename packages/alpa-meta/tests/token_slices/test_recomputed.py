"""What `jax.checkpoint` recomputes along the tokens, from what no slice of the backward pass has
made."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from sliced_steps import CAUSAL, TOKENS, attention, check, cut, program, step_of

import alpa_meta as alpa
from alpa_meta.compat import open_jaxpr, shape_of
from alpa_meta.operators import kernel_kind


def decayed(weights, x):
    """Return a recurrence whose decays are of each token, as an associative scan."""
    decay = jax.nn.sigmoid(x @ weights["k"])
    return lax.associative_scan(
        lambda one, two: (one[0] * two[0], one[1] * two[0] + two[1]),
        (decay, x @ weights["q"]),
        axis=1,
    )[1]


def shifted(weights, x):
    """Return a convolution by hand: a sum of the tokens before each, by weights."""
    padded = jnp.pad(x @ weights["q"], ((0, 0), (3, 0), (0, 0)))
    return sum(padded[:, k : k + TOKENS] * weights["k"][k] for k in range(4))


def selective(weights, x):
    """Return a recurrence of a convolution, as in Mamba."""

    def advance(state, one):
        state = jnp.tanh(state @ weights["q"]) + one
        return state, state

    by_time = jnp.moveaxis(jax.nn.silu(shifted(weights, x)), 1, 0)
    return jnp.moveaxis(lax.scan(advance, jnp.zeros(x.shape[::2]), by_time)[1], 0, 1)


def depthwise(weights, x):
    """Return an associative scan of a convolution, as in Mamba."""
    made = lax.conv_general_dilated(
        x @ weights["q"],
        weights["k"][:, None],
        (1,),
        [(3, 0)],
        dimension_numbers=("NHC", "HIO", "NHC"),
        feature_group_count=x.shape[-1],
    )
    return decayed(weights, jax.nn.silu(made))


def smeared(weights, x):
    """Return each token with some of the one before it."""
    gate = jax.nn.sigmoid(x[:, 1:] @ weights["q"])
    return jnp.concatenate([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)


attend = attention(lambda scores, _: jax.nn.softmax(jnp.where(CAUSAL, scores, -1e30)))
MIXED = {
    "a token shift": smeared,
    "a sum of exponentials": lambda weights, x: lax.cumlogsumexp(x @ weights["q"], axis=1),
    "attention to an associative scan": lambda w, x: attend(w, jnp.tanh(x + decayed(w, x))),
    "a convolution and a scan": selective,
    # parts that stand above, alone or together with others
    "an associative scan": decayed,
    "a convolution and an associative scan": depthwise,
    "an associative scan beside attention": lambda w, x: attend(w, x) + decayed(w, x),
}


def recomputed(mixed):
    """Return two layers that are scanned and recomputed."""

    @jax.checkpoint
    def layer(weights, x):
        return x + jnp.tanh(mixed(weights, x)) @ weights["v"]

    return lambda weights, x: lax.scan(lambda x, _: (layer(weights, x), None), x, length=2)[0]


@pytest.mark.sample(mixed=3)
@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
def test_recomputed_layers_that_run_along_the_tokens_run_in_slices(mixed):
    check(*step_of(recomputed(mixed)), (5, 7))


def test_only_what_runs_along_the_tokens_is_recomputed_for_all_of_them():
    sliced = cut(program(*step_of(recomputed(depthwise))), (1, 11))
    loops = [eqn for eqn in open_jaxpr(sliced.closed).eqns if eqn.primitive.name == "scan"]
    (body,) = [e.params["jaxpr"] for e in loops[-1].params["jaxpr"].eqns if "jaxpr" in e.params]
    products = [eqn for eqn in open_jaxpr(body).eqns if kernel_kind(eqn) == "matmul"]
    shapes = [shape_of(eqn.outvars[0]) for eqn in products]
    rows = [shape[1] for shape in shapes if len(shape) == 3]
    assert 1 in rows and TOKENS in rows


def test_two_stages_of_recomputed_scans_give_what_one_device_does():
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    layer = jax.checkpoint(lambda weights, x: jnp.tanh(depthwise(weights, x) @ weights["v"]))

    def step(state, x):
        def loss(layers):
            y = x
            for one in layers:
                y = y + layer(one, y)
            return jnp.mean(y**2)

        value, found = jax.value_and_grad(loss)(state[0])
        updates, moments = optimiser.update(found, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    _, (weights, x) = step_of(None, batch=4)
    both = [weights, {name: -one for name, one in weights.items()}]
    args = ((both, optimiser.init(both)), x)
    options = alpa.Options(num_stages=2, num_microbatches=2, donate=False, cache=False)
    sliced = alpa.parallelize(step, cluster="host:2", options=options, token_slices=(3, 6, 3))
    expected, found = jax.jit(step)(*args), sliced.gather(sliced(*args))
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-10, atol=1e-12)
