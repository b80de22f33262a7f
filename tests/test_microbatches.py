"""Steps in microbatches, on one mesh and as pipelines, against the plain step on one device."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa

KEYS = jax.random.split(jax.random.key(0), 4)
WEIGHTS = {
    "a": 0.3 * jax.random.normal(KEYS[0], (8, 16)),
    "b": 0.3 * jax.random.normal(KEYS[1], (16, 8)),
}
BATCH = {
    "x": jax.random.normal(KEYS[2], (8, 4, 8)),
    "mask": (jax.random.uniform(KEYS[3], (8, 4)) > 0.3).astype(jnp.float32),
}

HALVES = slice(4), slice(4, 8)


def errors(w, batch, key=None):
    hidden = jnp.tanh(batch["x"] @ w["a"])
    if key is not None:
        hidden *= jax.random.bernoulli(key, 0.8, hidden.shape)
    return jnp.square(hidden @ w["b"] - batch["x"]).mean(-1)


def masked_with_dropout(w, batch):
    kept = errors(w, batch, jax.random.key(5)) * batch["mask"]
    return kept.sum() / jnp.maximum(batch["mask"].sum(), 1)


def experts_and_root(w, batch):
    router = jax.nn.softmax(batch["x"] @ w["a"][:, :4])
    share = jax.nn.one_hot(router.argmax(-1), 4).mean((0, 1))
    balance = 4 * jnp.sum(share * router.mean((0, 1)))
    return jnp.sqrt(errors(w, batch).mean()) + 0.1 * balance


def batch_normalised(w, batch):
    hidden = batch["x"] @ w["a"]
    hidden = (hidden - hidden.mean((0, 1))) / jnp.sqrt(hidden.var((0, 1)) + 1e-5)
    return jnp.square(hidden @ w["b"] - batch["x"]).mean()


def preferred(w, batch):
    """Chosen and rejected answers in one forward pass (DPO), which return what the pass gives."""
    both = jnp.concatenate([batch["x"], batch["x"][:, ::-1]])
    scores = (jnp.tanh(both @ w["a"]) @ w["b"])[..., 0].mean(1)
    chosen, rejected = scores[: len(batch["x"])], scores[len(batch["x"]) :]
    return -jax.nn.log_sigmoid(chosen - rejected).mean(), scores


def three_views(w, batch):
    """Three views one behind the other, with dropout, rolled against each other (BYOL)."""
    views = jnp.concatenate([batch["x"], batch["x"] ** 2, -batch["x"]])
    hidden = jnp.tanh(views @ w["a"]) * jax.random.bernoulli(jax.random.key(7), 0.8, (24, 4, 16))
    seen = hidden @ w["b"]
    targets = jax.lax.stop_gradient(jnp.roll(seen, len(batch["x"]), 0))
    first, *others = jnp.split(seen, 3)
    return jnp.square(seen - targets).mean() + jnp.square(first - others[1]).mean()


def step_of(loss):
    def step(w, batch):
        value, gradients = jax.value_and_grad(loss)(w, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value

    return step


def agrees(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.sample("loss", "num_stages")
@pytest.mark.parametrize("loss", [masked_with_dropout, experts_and_root, three_views])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_microbatches_change_no_result(loss, num_stages):
    step = step_of(loss)
    expected = jax.jit(step)(WEIGHTS, BATCH)
    parallel = alpa.parallelize(step, cluster="host:4", num_stages=num_stages, num_microbatches=4)
    audit = parallel.audit(WEIGHTS, BATCH)
    assert audit.ok, str(audit)
    agrees(parallel.gather(parallel(jax.tree.map(jnp.copy, WEIGHTS), BATCH)), expected)


@pytest.mark.sample(num_stages=1)
@pytest.mark.parametrize("num_stages", [2, 1])
def test_batches_one_behind_the_other_are_cut_each(num_stages):
    def step(w, batch):
        result, gradients = jax.value_and_grad(preferred, has_aux=True)(w, batch)
        joined = jnp.concatenate([result[1][:8] - result[1][8:], result[1]])
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), (*result, joined)

    expected = jax.jit(step)(WEIGHTS, BATCH)
    parallel = alpa.parallelize(step, cluster="host:4", num_stages=num_stages, num_microbatches=4)
    audit = parallel.audit(WEIGHTS, BATCH)
    assert audit.ok, str(audit)
    agrees(parallel.gather(parallel(jax.tree.map(jnp.copy, WEIGHTS), BATCH)), expected)


def remembering(state, batch):
    """A queue of embeddings (MoCo), priorities by place (replay), ranks and a median of losses."""

    def loss(w):
        each = errors(w, batch)
        return each.mean(), (batch["x"] @ w["a"], each)

    (value, (hidden, each)), gradients = jax.value_and_grad(loss, has_aux=True)(state["w"])
    large = each.mean(1) > jnp.median(each)
    new = {
        "w": jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], gradients),
        "queue": jnp.concatenate([state["queue"][len(hidden) :], hidden[:, 0]]),
        "priorities": state["priorities"].at[batch["place"]].set(each.max(1)),
    }
    timed = hidden.swapaxes(0, 1).reshape(-1, 16)  # the batch behind the tokens
    return new, {
        "loss": value,
        "median": jnp.median(each),
        "ranks": jnp.argsort(jnp.argsort(each.mean(1))),
        "first": jnp.argmax(large),
        "running": jax.lax.scan(lambda s, x: (0.9 * s + x, s), 0.0, each[:, 0])[1],
        "normal": (each - jnp.median(each)) / jnp.linalg.norm(gradients["a"]),
        "timed": jnp.sort(timed[:, 0]),
    }


@pytest.mark.sample(num_stages=1)
@pytest.mark.parametrize("num_stages", [2, 1])
def test_what_no_gradient_depends_on_is_of_the_whole_batch(num_stages):
    batch = BATCH | {"place": jnp.array([3, 1, 12, 7, 0, 15, 4, 9])}
    state = {"w": WEIGHTS, "queue": jnp.ones((24, 16)), "priorities": jnp.ones(16)}
    expected = jax.jit(remembering)(state, batch)
    parallel = alpa.parallelize(
        remembering, cluster="host:4", num_stages=num_stages, num_microbatches=4
    )
    audit = parallel.audit(state, batch)
    assert audit.ok, str(audit)
    agrees(parallel.gather(parallel(jax.tree.map(jnp.copy, state), batch)), expected)


def test_values_of_examples_leave_whole_where_a_product_is_summed_over_devices():
    def step(w, batch):
        value, gradients = jax.value_and_grad(lambda w: errors(w, batch).mean())(w)
        probe = jnp.tanh(batch["x"] @ w["a"]) @ w["b"]  # nothing reads it
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), (value, probe)

    expected = jax.jit(step)(WEIGHTS, BATCH)
    pins = {"w['a']": (None, "x"), "w['b']": ("x", None)}
    options: dict[str, Any] = {"num_stages": 1, "num_microbatches": 4, "mesh_shape": (4,)}
    parallel = alpa.parallelize(step, cluster="host:4", pins=pins, **options)
    agrees(parallel.gather(parallel(jax.tree.map(jnp.copy, WEIGHTS), BATCH)), expected)


@pytest.mark.sample(num_stages=1)
@pytest.mark.parametrize("num_stages", [2, 1])
def test_a_gradient_in_the_loss_is_added_up_before_it(num_stages):
    def penalised(w, batch):
        def loss(w):
            return errors(w, batch).mean()

        slopes = jax.grad(loss)(w)
        return loss(w) + 0.1 * sum(jnp.sum(g**2) for g in jax.tree.leaves(slopes))

    step = step_of(penalised)
    expected = jax.jit(step)(WEIGHTS, BATCH)
    parallel = alpa.parallelize(step, cluster="host:4", num_stages=num_stages, num_microbatches=4)
    agrees(parallel.gather(parallel(jax.tree.map(jnp.copy, WEIGHTS), BATCH)), expected)


@pytest.mark.sample(num_stages=1)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_penalty_beside_gradients_of_several_stages_is_added_once(num_stages):
    def decayed(w, batch):
        mean = errors(w, batch).mean()
        decay = sum(jnp.sum((p - 0.1) ** 2) for p in jax.tree.leaves(w))
        return mean + decay + jnp.exp(-errors(w, batch).mean())  # whose gradients come first

    step = step_of(decayed)
    expected = jax.jit(step)(WEIGHTS, BATCH)
    parallel = alpa.parallelize(step, cluster="host:4", num_stages=num_stages, num_microbatches=4)
    agrees(parallel.gather(parallel(jax.tree.map(jnp.copy, WEIGHTS), BATCH)), expected)


@pytest.mark.sample(seed=1)
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_with_totals_change_no_result(seed):
    step = step_of(experts_and_root)
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2}
    plan = alpa.parallelize(step, cluster="host:4", **options).random_plan(
        WEIGHTS, BATCH, seed=seed
    )
    parallel = alpa.parallelize(step, plan=plan)
    found = parallel.gather(parallel(jax.tree.map(jnp.copy, WEIGHTS), BATCH))
    agrees(found, jax.jit(step)(WEIGHTS, BATCH))


def test_inexact_microbatches_are_means_of_means_and_say_so():
    step = step_of(batch_normalised)
    parallel = alpa.parallelize(
        step, cluster="host:4", num_stages=1, num_microbatches=2, exact=False
    )
    with pytest.warns(UserWarning, match="means over the microbatches"):
        found = parallel.gather(parallel(jax.tree.map(jnp.copy, WEIGHTS), BATCH))
    first, second = (jax.tree.map(operator.itemgetter(part), BATCH) for part in HALVES)
    results = step(WEIGHTS, first), step(WEIGHTS, second)
    agrees(found, jax.tree.map(lambda a, b: (a + b) / 2, *results))


def test_a_plan_of_inexact_microbatches_runs_where_they_are_accepted_only():
    step = step_of(batch_normalised)
    options: dict[str, Any] = {"cluster": "host:4", "num_stages": 1, "num_microbatches": 2}
    first = alpa.parallelize(step, **options, exact=False)
    with pytest.warns(UserWarning, match="means over the microbatches"):
        plan = first.plan_for(WEIGHTS, BATCH)
    with pytest.raises(alpa.PlanError, match=r"test_microbatches\.py.*exact=False"):
        alpa.parallelize(step, plan=plan).plan_for(WEIGHTS, BATCH)
    again = alpa.parallelize(step, plan=plan, exact=False).plan_for(WEIGHTS, BATCH)
    assert again.step_seconds == plan.step_seconds


def test_batch_normalisation_is_refused_with_the_users_line():
    parallel = alpa.parallelize(step_of(batch_normalised), cluster="host:4", num_microbatches=2)
    with pytest.raises(alpa.PlanError, match=r"test_microbatches\.py.*exact=False"):
        parallel.plan_for(WEIGHTS, BATCH)


def test_stages_that_cannot_overlap_are_announced():
    parallel = alpa.parallelize(step_of(batch_normalised), cluster="host:4", num_stages=2)
    with pytest.warns(UserWarning, match="run one after the other"):
        parallel.plan_for(WEIGHTS, BATCH)
