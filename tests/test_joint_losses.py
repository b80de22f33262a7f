"""Losses that take all examples together, in microbatches, against the plain step on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_meta as alpa
from alpa_meta.compat import shape_of
from alpa_meta.microbatch import cut
from alpa_meta.step.program import Step

B, D, H, E = 16, 6, 12, 8
KEYS = jax.random.split(jax.random.key(0), 8)
WEIGHTS = {
    "in": 0.4 * jax.random.normal(KEYS[0], (D, H)),
    "out": 0.4 * jax.random.normal(KEYS[1], (H, E)),
    "text": 0.4 * jax.random.normal(KEYS[2], (D, E)),
    "scale": jnp.float32(0.3),
}
BATCH = {
    "image": jax.random.normal(KEYS[3], (B, D)),
    "text": jax.random.normal(KEYS[4], (B, D)),
    "label": jax.random.randint(KEYS[5], (B,), 0, 3),
    "target": jax.random.normal(KEYS[6], (B, E)),
}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def image(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"]


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def clip(w, batch):
    """Radford et al. 2021, figure 3."""
    logits = unit(image(w, batch["image"])) @ unit(batch["text"] @ w["text"]).T
    logits = jnp.exp(w["scale"]) * logits
    places = jnp.arange(len(logits))
    accuracy = (logits.argmax(1) == places).mean()
    return cross_entropy(logits, places).mean() + cross_entropy(logits.T, places).mean(), accuracy


def sigmoid_pairs(w, batch):
    """SigLIP: Zhai et al. 2023, algorithm 1."""
    logits = image(w, batch["image"]) @ (batch["text"] @ w["text"]).T * jnp.exp(w["scale"]) - 1
    return -jax.nn.log_sigmoid((2 * jnp.eye(B) - 1) * logits).sum() / B


def two_views(w, batch):
    """SimCLR: Chen et al. 2020, algorithm 1, both views in one forward pass, with dropout."""
    views = jnp.concatenate([batch["image"], batch["text"]])
    kept = jax.random.bernoulli(jax.random.key(3), 0.8, (2 * B, D))
    z = unit(image(w, views * kept))
    logits = jnp.where(jnp.eye(2 * B, dtype=bool), -1e9, z @ z.T / 0.5)
    return cross_entropy(logits, (jnp.arange(2 * B) + B) % (2 * B)).mean()


def supervised_pairs(w, batch):
    """Supervised contrastive learning: Khosla et al. 2020, equation 2."""
    z, label = unit(image(w, batch["image"])), batch["label"]
    others = 1 - jnp.eye(B)
    logits = z @ z.T / 0.2
    logits -= jax.lax.stop_gradient(logits.max(1, keepdims=True))
    fitting = (label[:, None] == label[None]) * others
    logs = logits - jnp.log((jnp.exp(logits) * others).sum(1, keepdims=True))
    return -((fitting * logs).sum(1) / jnp.maximum(fitting.sum(1), 1)).mean()


def told_apart(w, batch):
    """Triplets of the farthest example of a class and the nearest of others, by truths."""
    z, label = image(w, batch["image"]), batch["label"]
    distances = jnp.square(z[:, None] - z[None]).sum(-1)
    alike, shown = label[:, None] == label[None], (z.sum(1) > 0)[None]
    farthest = jnp.where(alike, distances, -jnp.inf).max(1)
    nearest = jnp.where(alike | ~shown, jnp.inf, distances).min(1, initial=9.0)
    return jax.nn.relu(1 + farthest - nearest).mean()


def decorrelated(w, batch):
    """Barlow twins: Zbontar et al. 2021, algorithm 1."""
    first, second = image(w, batch["image"]), batch["text"] @ w["text"]
    first, second = ((z - z.mean(0)) / z.std(0) for z in (first, second))
    return jnp.sum((first.T @ second / B - jnp.eye(E)) ** 2)


def prototypes(w, batch):
    """Prototypical networks: Snell et al. 2017, equations 1 and 2."""
    z, of_class = image(w, batch["image"]), jax.nn.one_hot(batch["label"], 3)
    centres = of_class.T @ z / jnp.maximum(of_class.sum(0)[:, None], 1)
    distances = jnp.square(z[:, None] - centres[None]).sum(-1)
    return cross_entropy(-distances, batch["label"]).mean()


def transported(w, batch):
    """An entropic transport between two batches, by a scan of Sinkhorn's steps."""
    z = image(w, batch["image"])
    cost = jnp.square(z[:, None] - batch["target"][None]).sum(-1) / E
    kernel = jnp.exp(-cost)

    def scaled(pair, _):
        rows = 1 / (kernel @ pair[1])
        return (rows, 1 / (kernel.T @ rows)), None

    (rows, columns), _ = jax.lax.scan(scaled, (jnp.ones(B), jnp.ones(B)), None, length=4)
    return jnp.sum(rows[:, None] * kernel * columns[None] * cost)


def correlation(w, batch):
    z, y = image(w, batch["image"])[:, 0], batch["target"][:, 0]
    z, y = z - z.mean(), y - y.mean()
    return 1 - (z * y).sum() / jnp.sqrt((z * z).sum() * (y * y).sum())


def hardest(w, batch):
    """The mean of the largest losses, those above the median, and the worst."""
    errors = jnp.square(image(w, batch["image"]) - batch["target"]).mean(1)
    large = errors > jax.lax.stop_gradient(jnp.median(errors))
    return jax.lax.top_k(errors, 4)[0].mean() + (errors * large).sum() + errors.max()


def halves(w, batch):
    """The first half of the batch is preferred to the second."""
    better, worse = jnp.split(image(w, batch["image"])[:, 0], 2)
    return -jax.nn.log_sigmoid(better - worse).mean()


def normalised_last(w, batch):
    """Batch normalisation of what only the loss reads."""
    z = image(w, batch["image"])
    z = w["scale"] * (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5)
    return jnp.square(z - batch["target"]).mean()


LOSSES = (
    two_views,
    clip,
    hardest,
    halves,
    transported,
    prototypes,
    sigmoid_pairs,
    supervised_pairs,
    told_apart,
    decorrelated,
    correlation,
    normalised_last,
)


def step_of(loss):
    def step(w, batch):
        value, gradients = jax.value_and_grad(loss, has_aux=loss is clip)(w, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value

    return step


def assert_close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-6)


@pytest.mark.sample("loss", "num_stages", loss=6)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_all_examples_are_read_together(loss, num_stages):
    step = step_of(loss)
    parallel = alpa.parallelize(step, cluster="host:4", num_stages=num_stages, num_microbatches=4)
    found = parallel.gather(parallel(jax.tree.map(jnp.copy, WEIGHTS), BATCH))
    assert_close(found, jax.jit(step)(WEIGHTS, BATCH))


@pytest.mark.sample(seed=1)
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_agree(seed):
    step = step_of(clip)
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4}
    plan = alpa.parallelize(step, cluster="host:4", **options).random_plan(
        WEIGHTS, BATCH, seed=seed
    )
    parallel = alpa.parallelize(step, plan=plan)
    found = parallel.gather(parallel(jax.tree.map(jnp.copy, WEIGHTS), BATCH))
    assert_close(found, jax.jit(step)(WEIGHTS, BATCH))


def test_evaluation_agrees():
    step = step_of(clip)
    expected = jax.jit(step)(WEIGHTS, BATCH)
    parallel = alpa.parallelize(step, cluster="host:4", num_stages=2, num_microbatches=4)
    assert_close(parallel.evaluate(WEIGHTS, BATCH)[1], expected[1])
    audit = parallel.audit(WEIGHTS, BATCH)
    assert audit.ok, str(audit)


def test_the_planner_may_cut_such_a_step():
    parallel = alpa.parallelize(step_of(clip), cluster="host:2", num_stages=2)
    plan = parallel.plan_for(WEIGHTS, BATCH)
    assert plan.num_microbatches > 1
    assert not plan.program.uncut


def test_a_microbatch_encodes_its_own_examples_only():
    program = Step(step_of(clip), (WEIGHTS, BATCH)).program(4)
    assert [shape_of(var) for var in program.totals] == [(B, E), (E, B)]
    leaves = dict(zip(program.jaxpr.invars, program.inputs, strict=True))
    encoded = [
        shape_of(eqn.outvars[0])
        for eqn, phase in zip(program.jaxpr.eqns, program.phases.of_eqn, strict=True)
        if eqn.primitive.name == "dot_general"
        and phase == "forward"
        and any(leaves[atom].role == "state" for atom in eqn.invars if atom in leaves)
    ]
    assert {shape[0] for shape in encoded} == {B // 4}


def test_what_is_read_whole_is_found_in_three_walks(monkeypatch):
    def refused(walks):
        monkeypatch.setattr(cut, "MOST_ROUNDS", walks)
        programs = {loss: Step(step_of(loss), (WEIGHTS, BATCH)).program(2) for loss in LOSSES}
        return {loss for loss, program in programs.items() if program.inexact}

    assert not refused(3)
    assert correlation in refused(2)
    assert refused(1) == set(LOSSES)


def test_a_model_behind_batch_statistics_is_refused():
    def normalised_first(w, batch):
        hidden = batch["image"] @ w["in"]
        hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5)
        return jnp.square(jnp.tanh(hidden) @ w["out"] - batch["target"]).mean()

    parallel = alpa.parallelize(step_of(normalised_first), cluster="host:4", num_microbatches=2)
    with pytest.raises(alpa.PlanError, match=r"test_joint_losses\.py.*mixes examples"):
        parallel.plan_for(WEIGHTS, BATCH)
