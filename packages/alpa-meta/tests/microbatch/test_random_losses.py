"""Random losses, most of which mix examples: exact in microbatches, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cut_steps import in_microbatches, step_of

from alpa_meta.step.program import Step

B, D, H = 8, 5, 6
RANDOM = np.random.default_rng(1)
WEIGHTS = {
    "a": RANDOM.normal(size=(D, H)),
    "b": RANDOM.normal(size=(H, H)),
    "scale": RANDOM.normal(size=H),
}
BATCH = {
    "x": RANDOM.normal(size=(B, D)),
    "y": RANDOM.normal(size=(B, H)),
    "label": RANDOM.integers(0, 3, B),
}

STEPS = (
    lambda z, w, batch: z - z.mean(0),
    lambda z, w, batch: z / jnp.sqrt(z.var(0) + 0.1),
    lambda z, w, batch: z / jnp.linalg.norm(z, axis=1, keepdims=True),
    lambda z, w, batch: jax.nn.softmax(z, 0),
    lambda z, w, batch: jnp.tanh(z @ z.T) @ z,
    lambda z, w, batch: jnp.tanh(z @ batch["y"].T) @ z,
    lambda z, w, batch: jnp.sort(z, 0),
    lambda z, w, batch: jnp.cumsum(z, 0) / B,
    lambda z, w, batch: z + jnp.roll(z, 1, 0),
    lambda z, w, batch: z[jnp.argsort(batch["y"][:, 0])],
    lambda z, w, batch: jnp.where(batch["y"][:, :1] > 0, z, -z) * w["scale"],
    lambda z, w, batch: (
        z - jax.nn.one_hot(batch["label"], 3, axis=0).astype(z.dtype).sum() * z.max(0)
    ),
    lambda z, w, batch: z * (z.sum(1) > jnp.median(z.sum(1)))[:, None],
    lambda z, w, batch: jnp.concatenate([z, batch["y"]])[B // 2 : B // 2 + B],
    lambda z, w, batch: (lambda both: both[:B] * both[B:])(
        jnp.tanh(jnp.concatenate([z, batch["y"]]))
    ),
    lambda z, w, batch: z.reshape(2, B // 2, H).mean(0).repeat(2, 0),
    lambda z, w, batch: jnp.tanh(z @ w["b"]),
    lambda z, w, batch: z * jax.random.bernoulli(jax.random.key(1), 0.8, z.shape),
)
ENDS = (
    lambda z, batch: jnp.mean((z - batch["y"]) ** 2),
    lambda z, batch: jax.nn.logsumexp(z),
    lambda z, batch: jnp.linalg.norm(z.T @ batch["y"]),
    lambda z, batch: jax.lax.top_k(jnp.sum(z**2, 1), 3)[0].sum(),
    lambda z, batch: -jax.nn.log_softmax(z @ z.T)[jnp.arange(B), (jnp.arange(B) + 1) % B].mean(),
)


def _loss(seed):
    random = np.random.default_rng(seed)
    chosen = [STEPS[k] for k in random.integers(len(STEPS), size=random.integers(1, 4))]
    end = ENDS[random.integers(len(ENDS))]

    def loss(w, batch):
        z = jnp.tanh(batch["x"] @ w["a"]) @ w["b"]
        for step in chosen:
            z = step(z, w, batch)
        return end(z, batch)

    return loss


@pytest.mark.sample(seed=8)
@pytest.mark.parametrize("seed", range(300))
def test_a_random_loss_is_exact_or_refused(seed):
    with jax.enable_x64(True):
        step = step_of(_loss(seed))
        if Step(step, (WEIGHTS, BATCH)).program(4).inexact:
            return
        found = in_microbatches(step, 4, WEIGHTS, BATCH)
        expected = step(WEIGHTS, BATCH)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


def test_most_of_them_are_exact():
    with jax.enable_x64(True):
        refused = [
            bool(Step(step_of(_loss(seed)), (WEIGHTS, BATCH)).program(4).inexact)
            for seed in range(20)
        ]
    assert sum(refused) < len(refused) / 2
