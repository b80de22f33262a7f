"""Steps that accumulate gradients in a loop of their own run in stages and microbatches of ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_meta.operators.regions import is_scan
from alpa_meta.step.program import Step

LAYERS, WIDTH, EXAMPLES, PARTS = 4, 8, 24, 3
RATE = 0.1


def _state():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return weights, jax.random.key(1)


def _batch():
    return jax.random.normal(jax.random.key(2), (EXAMPLES, WIDTH))


def _loss(weights, x, key=None):
    y = x
    for w in weights:
        y = jnp.tanh(y @ w)
        if key is not None:
            y = y * jax.random.bernoulli(key, 0.8, y.shape)
    return jnp.mean((y - x) ** 2)


def _zeros(weights):
    return 0.0, jax.tree.map(jnp.zeros_like, weights)


def _parts(batch):
    return batch.reshape(PARTS, -1, WIDTH)


def _moved(state, total, key=None):
    loss, gradients = total
    weights = [w - RATE * g / PARTS for w, g in zip(state[0], gradients, strict=True)]
    return (weights, state[1] if key is None else key), loss / PARTS


def scanned(state, batch):
    def round_(total, part):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(_loss)(state[0], part)), None

    return _moved(state, jax.lax.scan(round_, _zeros(state[0]), _parts(batch))[0])


def counted(state, batch):
    def round_(k, total):
        part = jax.lax.dynamic_slice_in_dim(batch, k * (EXAMPLES // PARTS), EXAMPLES // PARTS)
        return jax.tree.map(jnp.add, total, jax.value_and_grad(_loss)(state[0], part))

    return _moved(state, jax.lax.fori_loop(0, PARTS, round_, _zeros(state[0])))


def with_a_key_for_each_round(state, batch):
    def round_(carry, part):
        total, key = carry
        key, own = jax.random.split(key)
        found = jax.value_and_grad(_loss)(state[0], part, own)
        return (jax.tree.map(jnp.add, total, found), key), found[0]

    first = _zeros(state[0]), state[1]
    (total, key), losses = jax.lax.scan(round_, first, _parts(batch))
    moved, loss = _moved(state, total, key)
    return moved, {"loss": loss, "of each round": losses}


def summed_over_what_counts(state, batch):
    def error(weights, part):
        counts = part[:, 0] > 0
        return jnp.sum(counts * jnp.sum((part @ weights[0] @ weights[1]) ** 2, 1)), counts.sum()

    def round_(carry, part):
        (loss, count), gradients = jax.value_and_grad(error, has_aux=True)(state[0], part)
        return jax.tree.map(jnp.add, carry, (loss, gradients, count)), None

    (loss, gradients, count), _ = jax.lax.scan(round_, (*_zeros(state[0]), 0), _parts(batch))
    return _moved(state, (loss, [g / count for g in gradients]))


def over_scanned_layers(state, batch):
    def loss(weights, part):
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), part, jnp.stack(weights))
        return jnp.mean((y - part) ** 2)

    def round_(total, part):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(state[0], part)), None

    return _moved(state, jax.lax.scan(round_, _zeros(state[0]), _parts(batch))[0])


def one_step_after_the_other(state, batch):
    def round_(weights, part):
        loss, gradients = jax.value_and_grad(_loss)(weights, part)
        return [w - RATE * g for w, g in zip(weights, gradients, strict=True)], loss

    weights, losses = jax.lax.scan(round_, state[0], _parts(batch))
    return (weights, state[1]), losses.mean()


def with_a_running_mean(state, batch):
    def round_(carry, part):
        total, mean = carry
        mean = 0.9 * mean + 0.1 * part.mean(0)
        found = jax.value_and_grad(_loss)(state[0], part - mean)
        return (jax.tree.map(jnp.add, total, found), mean), None

    first = _zeros(state[0]), jnp.zeros(WIDTH)
    (total, _), _ = jax.lax.scan(round_, first, _parts(batch))
    return _moved(state, total)


LOOPS = [scanned, counted, with_a_key_for_each_round, summed_over_what_counts, over_scanned_layers]


def _loops(step):
    program = Step(step, (_state(), _batch())).program(1)
    pairs = zip(program.jaxpr.eqns, program.phases.of_eqn, strict=True)
    return [eqn for eqn, phase in pairs if is_scan(eqn) and phase == "backward"]


@pytest.mark.sample("step", "options")
@pytest.mark.parametrize("options", [{}, {"num_stages": 2, "num_microbatches": PARTS}])
@pytest.mark.parametrize("step", LOOPS)
def test_a_loop_of_gradient_accumulation_is_cut_like_a_step_without(step, options):
    expected = jax.jit(step)(_state(), _batch())
    cluster = "host:4"
    ours = alpa.parallelize(step, cluster=cluster, options=alpa.Options(cache=False, **options))
    found = ours(_state(), _batch())
    assert Step(step, (_state(), _batch())).microbatch_counts == (1, PARTS)
    if options:
        plan = ours.plan_for(_state(), _batch())
        stages = plan.stage_plan.stages
        assert min(one.candidate.forward_seconds for one in stages) > 0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [one_step_after_the_other, with_a_running_mean])
def test_rounds_that_depend_on_one_another_stay_a_loop(step):
    assert len(_loops(step)) == 1


def test_parts_that_the_batch_comes_in_are_its_examples():
    step = Step(lambda state, parts: scanned(state, parts), (_state(), _parts(_batch())))
    assert step.microbatch_counts == (1, PARTS)
    phases = step.program(PARTS).phases.of_eqn
    assert phases.count("forward") > LAYERS


def test_microbatches_of_less_than_a_part_are_refused_with_the_line():
    step = alpa.parallelize(
        over_scanned_layers, cluster="host:2", options=alpa.Options(num_microbatches=6)
    )
    with pytest.raises(alpa.PlanError, match=r"takes more examples of the batch at a time.*"):
        step.plan_for(_state(), _batch())
