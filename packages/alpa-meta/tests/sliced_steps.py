"""Steps in token slices beside the steps themselves: small attention, whole and cut."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_meta.compat import open_jaxpr
from alpa_meta.step.program import Step
from alpa_meta.token_slices.places import Slices
from alpa_meta.token_slices.program import in_slices

TOKENS = 12
CAUSAL = np.tri(TOKENS, dtype=bool)


def program(step, args):
    """Return the traced step whose second argument is the batch."""
    return Step(step, args, batch_argnums=(1,)).program(1)


def cut(traced, lengths):
    """Return the program in slices of these lengths."""
    batch = [leaf.role == "batch" for leaf in traced.inputs]
    return in_slices(traced.closed, traced.phases.of_eqn, batch, Slices(lengths))


def compiled(closed, args):
    """Return the program of leaves; the compiler's optimisations take long, and change sums."""
    leaves = jax.tree.leaves(args)
    function = jax.jit(
        lambda *values: jax.core.eval_jaxpr(open_jaxpr(closed), closed.consts, *values)
    )
    quickly: dict[str, Any] = {"xla_backend_optimization_level": 0}
    return function.lower(*leaves).compile(quickly)


def run(closed, args):
    """Return the results of a program."""
    return compiled(closed, args)(*jax.tree.leaves(args))


def check(step, args, lengths, *others):
    """Compare a step in slices with the step, for `args` and `others`; return its program."""
    traced = program(step, args)
    sliced = cut(traced, lengths)
    whole, parts = (compiled(one.closed, args) for one in (traced, sliced))
    for leaves in map(jax.tree.leaves, (args, *others)):
        for one, two in zip(whole(*leaves), parts(*leaves), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)
    return sliced


def step_of(mixed, width=4, batch=2) -> tuple[Any, Any]:
    """Return the loss and gradients of `mixed(weights, x)` as a step, and arguments for it.

    `weights` are "q", "k", "v" [width, width], "w" [width] and "m" [tokens, tokens]; x is
    [batch, tokens, width].
    """

    def step(weights, x):
        def loss(weights):
            return jnp.mean(jnp.tanh(mixed(weights, x @ weights["v"])) ** 2)

        return jax.value_and_grad(loss)(weights)

    keys = jax.random.split(jax.random.key(0), 6)
    shapes = dict.fromkeys("qkv", (width, width)) | {"w": (width,), "m": (TOKENS, TOKENS)}
    weights = {n: jax.random.normal(k, s, float) for (n, s), k in zip(shapes.items(), keys)}
    return step, (weights, jax.random.normal(keys[5], (batch, TOKENS, width), float))


def attention(weigh):
    """Return attention as `step_of` takes it; `weigh(scores, weights)` makes scores weights."""

    def mixed(weights, x):
        scores = jnp.einsum("btd,bsd->bts", x @ weights["q"], x @ weights["k"])
        return jnp.einsum("bts,bsd->btd", weigh(scores, weights), x)

    return mixed
