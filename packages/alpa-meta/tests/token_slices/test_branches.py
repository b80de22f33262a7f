"""Conditionals in layers run in token slices, each slice its part of the branch that is taken."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sliced_steps import CAUSAL, attention, check, cut, program, step_of

import alpa_meta as alpa
from alpa_meta.compat import open_jaxpr
from alpa_meta.token_slices.values import SlicingError


def causal(constant):
    return attention(lambda scores, _: jax.nn.softmax(jnp.where(CAUSAL, scores, constant)))


def backward(weights, x):
    return attention(lambda scores, _: jax.nn.softmax(jnp.where(~CAUSAL, scores, -jnp.inf)))(
        weights, x
    )


def running(weights, x):
    return jnp.cumsum(jnp.tanh(x @ weights["q"]), 1)


def recurrent(weights, x):
    def advance(state, one):
        state = jnp.tanh(0.5 * state + one)
        return state, state

    _, found = lax.scan(advance, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x @ weights["k"], 1, 0))
    return jnp.moveaxis(found, 0, 1)


def either(*branches):
    def mixed(weights, x):
        number = jnp.clip((weights["w"][0] * 10).astype(int), 0, len(branches) - 1)
        return lax.switch(number, [lambda x, one=one: one(weights, x) for one in branches], x)

    return mixed


def kept(_, x):
    return x


def alternating(weights, x, around=lambda layer: layer):
    @around
    def layer(x, local):
        window = np.tri(len(CAUSAL), k=-3, dtype=bool)

        def of(mask):
            weigh = attention(lambda scores, _: jax.nn.softmax(jnp.where(mask, scores, -1e30)))
            return lambda x: weigh(weights, x)

        return x + lax.cond(local, of(CAUSAL & ~window), of(CAUSAL), x), None

    return lax.scan(layer, x, jnp.array([True, False, True]))[0]


def repeated(weights, x):
    """Two conditionals that read one constant mask."""
    for name in ("q", "k"):
        taken = weights[name][0, 0] > 0
        x = lax.cond(taken, lambda x: x + causal(-1e30)(weights, x), lambda x: x, x)
    return x


def recomputed(mixed):
    return lambda weights, x: jax.checkpoint(mixed)(weights, x)


def masked(*masks):
    def weigh(scores, weights):
        branches = [lambda s, mask=mask: jnp.where(mask, s, -1e30) for mask in masks]
        return jax.nn.softmax(lax.cond(weights["w"][0] > 0, *branches, scores))

    return attention(weigh)


CAUSAL_STEPS = {
    "a mixer, recomputed, whose result is mixed": recomputed(
        lambda weights, x: causal(-1e30)(weights, either(kept, running)(weights, jnp.tanh(x)))
    ),
    "the mask alone": masked(CAUSAL, np.eye(len(CAUSAL), dtype=bool)),
    "local and global layers, recomputed": partial(alternating, around=jax.checkpoint),
    "attention or nothing": either(causal(-1e30), kept),
    "three mixers": either(running, causal(-jnp.inf), recurrent),
    "two layers with one mask": repeated,
    "two recomputed mixers": either(recomputed(causal(-1e30)), kept, recomputed(recurrent)),
    # parts that stand above, alone or together with others
    "local and global layers": alternating,
    "attention or nothing, recomputed": recomputed(either(causal(-1e30), kept)),
    "recomputed attention or nothing": either(recomputed(causal(-1e30)), kept),
}


@pytest.mark.sample(mixed=3)
@pytest.mark.parametrize("mixed", CAUSAL_STEPS.values(), ids=CAUSAL_STEPS)
def test_whichever_branch_is_taken_slices_give_what_the_step_does(mixed):
    step, (weights, x) = step_of(mixed)
    firsts = (-1.0, 0.15, 1.0)  # of the three mixers each once
    args, *others = (({**weights, "w": weights["w"].at[0].set(one)}, x) for one in firsts)
    check(step, args, (5, 1, 6), *others)


def test_each_slice_runs_a_conditional_of_its_own_once_forward_and_once_backward():
    step, args = step_of(either(causal(-1e30), kept))
    sliced = cut(program(step, args), (5, 7))
    names = [eqn.primitive.name for eqn in open_jaxpr(sliced.closed).eqns]
    assert names.count("cond") == 2 * 2


REFUSED = {
    "a branch that looks ahead": (either(kept, backward), "reads tokens after its own"),
    "a recomputed one": (recomputed(either(kept, backward)), "reads tokens after its own"),
    "a recomputed branch": (
        either(recomputed(causal(-1e30)), recomputed(backward)),
        "reads tokens after its own",
    ),
    "a mask in one branch": (masked(CAUSAL, True), "reads tokens after its own"),
    "a mean over tokens in a branch": (
        either(kept, lambda _, x: x - x.mean(1, keepdims=True)),
        "reduces the tokens",
    ),
    "a condition on all tokens": (
        lambda _, x: lax.cond(x.sum() > 0, jnp.tanh, jnp.sin, x),
        "needs a value of all tokens",
    ),
}


@pytest.mark.parametrize(("mixed", "reason"), REFUSED.values(), ids=REFUSED)
def test_conditionals_that_are_not_causal_are_refused_with_the_line(mixed, reason):
    step, args = step_of(mixed)
    with pytest.raises(SlicingError, match=reason) as refused:
        cut(program(step, args), (5, 7))
    assert "test_branches.py" in str(refused.value) or "sliced_steps.py" in str(refused.value)


def test_two_stages_with_conditionals_give_what_one_device_does():
    layers = either(causal(-1e30), running)

    def step(weights, x):
        def loss(weights):
            y = x
            for one in weights:
                y = jnp.tanh(y + layers(one, y @ one["v"]))
            return jnp.mean(y**2)

        value, found = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda a, b: a - 0.1 * b, weights, found), value

    _, (weights, x) = step_of(layers)
    args = ([weights, {name: -w for name, w in weights.items()}], x)
    options = alpa.Options(num_stages=2, num_microbatches=1, donate=False, cache=False)
    sliced = alpa.parallelize(step, cluster="host:2", options=options, token_slices=(5, 1, 6))
    expected, found = jax.jit(step)(*args), sliced.gather(sliced(*args))
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-10, atol=1e-12)
