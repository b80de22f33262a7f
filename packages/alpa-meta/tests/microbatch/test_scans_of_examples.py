"""Scans over the examples of the batch: each microbatch makes the iterations of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa

KEYS = jax.random.split(jax.random.key(0), 3)
WEIGHTS = {
    "a": 0.3 * jax.random.normal(KEYS[0], (8, 16)),
    "b": 0.3 * jax.random.normal(KEYS[1], (16, 8)),
}
BATCH = {"x": jax.random.normal(KEYS[2], (8, 4, 8)), "n": jnp.arange(8) % 3}


def error(w, x):
    return jnp.square(jnp.tanh(x @ w["a"]) @ w["b"] - x).mean()


def mapped(w, batch):
    def one(given):
        x, n, key = given
        x = jax.lax.cond(n > 1, lambda x: jnp.tanh(x @ w["a"]) @ w["b"], lambda x: x, x)
        halved = jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] / 2), (0, 1.0))
        x += 0.1 * jax.random.normal(key, x.shape)
        x, _ = jax.lax.scan(lambda h, _: (h + jnp.sin(h @ w["a"] @ w["b"]), None), x, None, 2)
        return error(w, x) * jax.lax.stop_gradient(halved[1])

    keys = jax.random.split(jax.random.key(3), 8)
    return jax.lax.map(jax.checkpoint(one), (batch["x"], batch["n"], keys)).mean()


def mapped_in_groups(w, batch):
    return jnp.sqrt(jax.lax.map(lambda x: error(w, x), batch["x"], batch_size=2).mean())


def added_up(w, batch):
    def body(carry, x):
        total, count = carry
        return (total + error(w, x), count + 1), x.mean()

    (total, count), means = jax.lax.scan(body, (0.0, 0), batch["x"], reverse=True)
    return total / count + means.sum()


def step_of(loss):
    def step(w, batch):
        value, gradients = jax.value_and_grad(loss)(w, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value

    return step


def accumulating(w, batch):
    def body(sums, x):
        value, gradients = jax.value_and_grad(lambda w: error(w, x))(w)
        return jax.tree.map(lambda s, one: s + one / 4, sums, (value, gradients)), None

    none = (0.0, jax.tree.map(jnp.zeros_like, w))
    (value, gradients), _ = jax.lax.scan(body, none, batch["x"].reshape(4, 2, 4, 8))
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value


@pytest.mark.parametrize(
    ("step", "num_stages"),
    [(step_of(mapped), 1), (step_of(mapped_in_groups), 2), (step_of(added_up), 1),
     (accumulating, 1)],
    ids=["mapped", "in groups", "added up", "gradients"],
)  # fmt: skip
def test_microbatches_scan_their_own_examples(step, num_stages):
    expected = jax.jit(step)(WEIGHTS, BATCH)
    options: dict[str, Any] = {"num_stages": num_stages, "num_microbatches": 4}
    parallel = alpa.parallelize(step, cluster="host:2", **options)
    found = parallel.gather(parallel(jax.tree.map(jnp.copy, WEIGHTS), BATCH))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def moving_average(w, batch):
    return jax.lax.scan(lambda m, x: (0.9 * m + error(w, x), None), 0.0, batch["x"])[0]


def doubled(w, batch):
    return jax.lax.scan(lambda m, x: (m + m + error(w, x), None), 0.0, batch["x"])[0]


def looped(w, batch):
    def body(total, x):  # adds the total three times
        more, _ = jax.lax.scan(lambda h, _: (h + total, None), error(w, x), None, 3)
        return more, None

    return jax.lax.scan(body, 0.0, batch["x"])[0]


def swapped(w, batch):
    def body(carry, x):
        return (carry[1] + error(w, x), carry[0] - error(w, x) / 2), None

    return jax.lax.scan(body, (0.0, 0.0), batch["x"])[0][0]


@pytest.mark.parametrize("loss", [moving_average, doubled, looped, swapped])
def test_what_examples_hand_on_is_refused_where_it_is_no_sum(loss):
    parallel = alpa.parallelize(step_of(loss), cluster="host:2", num_microbatches=2)
    with pytest.raises(alpa.PlanError, match=r"test_scans_of_examples\.py.*mixes examples"):
        parallel.plan_for(WEIGHTS, BATCH)
