"""Rounds of gradient accumulation that a step has written out, or begins in front of a loop, run in
stages and microbatches of ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import alpa_meta as alpa
from alpa_meta.passes.batch_parts import parts_by_rounds
from alpa_meta.passes.equal_rounds import with_equal_rounds_at_once
from alpa_meta.step.program import Step

LAYERS, WIDTH, EXAMPLES, ROUNDS = 4, 8, 24, 4
SIZE = EXAMPLES // ROUNDS
RATE = 0.1


def _state():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]


def _batch():
    keys = jax.random.split(jax.random.key(2))
    return {
        "x": jax.random.normal(keys[0], (EXAMPLES, WIDTH)),
        "y": jax.random.normal(keys[1], (EXAMPLES,)),
    }


def _loss(weights, batch, noise=0.0):
    y = batch["x"]
    for w in weights:
        y = jnp.tanh(y @ w + noise)
    return jnp.mean((y.sum(1) - batch["y"]) ** 2)


_gradient = jax.value_and_grad(_loss)


def _part(batch, k):
    return jax.tree.map(lambda x: x[k * SIZE : (k + 1) * SIZE], batch)


def _sliced(batch, k):
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, k * SIZE, SIZE), batch)


def _moved(weights, total):
    loss, gradients = total
    return [w - RATE * g / ROUNDS for w, g in zip(weights, gradients, strict=True)], loss / ROUNDS


def _add(one, other):
    return jax.tree.map(jnp.add, one, other)


def _zeros(weights):
    return 0.0, jax.tree.map(jnp.zeros_like, weights)


def in_front_of_a_loop(weights, batch):
    def round_(k, total):
        return _add(total, _gradient(weights, _sliced(batch, k)))

    first = _gradient(weights, _part(batch, 0))
    return _moved(weights, jax.lax.fori_loop(1, ROUNDS, round_, first))


def in_front_of_a_scan(weights, batch):
    parts = jax.tree.map(lambda x: x.reshape(ROUNDS, SIZE, *x.shape[1:]), batch)

    def round_(total, part):
        return _add(total, _gradient(weights, part)), None

    first = _gradient(weights, jax.tree.map(lambda x: x[0], parts))
    rest = jax.tree.map(lambda x: x[1:], parts)
    return _moved(weights, jax.lax.scan(round_, first, rest)[0])


def under_a_condition_on_the_first(weights, batch):
    def round_(k, carry):
        total, gradients, key = carry
        key, own = jax.random.split(key)
        loss, more = _gradient(weights, _sliced(batch, k), jax.random.normal(own, (WIDTH,)))
        total = jax.lax.cond(k == 0, lambda: loss, lambda: total + loss)
        return total, _add(gradients, more), key

    first = *_zeros(weights), jax.random.key(1)
    return _moved(weights, jax.lax.fori_loop(0, ROUNDS, round_, first)[:2])


def one_after_the_other(weights, batch):
    total = _zeros(weights)
    for k in range(ROUNDS):
        total = _add(total, _gradient(weights, _part(batch, k)))
    return _moved(weights, total)


def of_every_fourth_example(weights, batch):
    total = _zeros(weights)
    for k in range(ROUNDS):
        part = jax.tree.map(lambda x, k=k: x[k::ROUNDS], batch)
        total = _add(total, _gradient(weights, part))
    return _moved(weights, total)


def of_split_arrays(weights, batch):
    parts = {name: jnp.split(x, ROUNDS) for name, x in batch.items()}
    found = [
        _gradient(weights, {name: every[k] for name, every in parts.items()}) for k in range(ROUNDS)
    ]
    losses, gradients = zip(*found, strict=True)
    means = jax.tree.map(lambda *every: jnp.mean(jnp.stack(every), 0), *gradients)
    moved = [w - RATE * g for w, g in zip(weights, means, strict=True)]
    return moved, {"mean": jnp.mean(jnp.array(losses)), "of each": jnp.stack(losses)}


def as_a_running_mean(weights, batch):
    mean = _gradient(weights, _part(batch, 0))
    for k in range(1, ROUNDS):
        own = _gradient(weights, _part(batch, k))
        mean = jax.tree.map(lambda m, o, k=k: m + (o - m) / (k + 1), mean, own)
    loss, gradients = mean
    return [w - RATE * g for w, g in zip(weights, gradients, strict=True)], loss


def with_keys_of_their_own(weights, batch):
    key, total = jax.random.key(1), _zeros(weights)
    for k in range(ROUNDS):
        key, own = jax.random.split(key)
        noise = jax.random.normal(jax.random.fold_in(own, k), (WIDTH,))
        total = _add(total, _gradient(weights, _part(batch, k), noise))
    return _moved(weights, total)


def with_the_noise_of_the_last_in_all(weights, batch):
    keys = jax.random.split(jax.random.key(1), ROUNDS)
    noises = [jax.random.normal(key, (WIDTH,)) for key in keys]
    total = _zeros(weights)
    for k in range(ROUNDS):
        noise = noises[k] * noises[-1] + noises[(k + 1) % ROUNDS]
        total = _add(total, _gradient(weights, _part(batch, k), noise))
    return _moved(weights, total)


def of_recomputed_layers_in_bfloat16(weights, batch):
    @jax.checkpoint
    def layer(y, w):
        return jnp.tanh(y @ w.astype(jnp.bfloat16).astype(jnp.float32))

    def loss(weights, batch):
        y = batch["x"]
        for w in weights:
            y = layer(y, w)
        return jnp.mean((y.sum(1) - batch["y"]) ** 2)

    total = _zeros(weights)
    for k in range(ROUNDS):
        total = _add(total, jax.value_and_grad(loss)(weights, _part(batch, k)))
    return _moved(weights, total)


def clipped_and_weighted(weights, batch):
    """Each gradient is clipped, and counts as its round has positive examples."""
    total, count = _zeros(weights), jnp.array(0)
    for k in range(ROUNDS):
        part = _part(batch, k)
        loss, gradients = _gradient(weights, part)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        positive = jnp.sum(part["y"] > 0)
        clipped = [g * positive / jnp.maximum(norm, 1) for g in gradients]
        total, count = _add(total, (loss, clipped)), count + positive
    loss, gradients = total
    return [w - RATE * g / count for w, g in zip(weights, gradients, strict=True)], loss


def inside_the_loss(weights, batch):
    def loss(weights):
        return sum(_loss(weights, _part(batch, k)) for k in range(ROUNDS))

    return _moved(weights, jax.value_and_grad(loss)(weights))


def with_more_told_of_the_first(weights, batch):
    def loss(weights, part):
        largest, places = jax.lax.top_k(part["x"], 2)
        return _loss(weights, part) * jnp.mean(largest), places

    total, first = _zeros(weights), None
    for k in range(ROUNDS):
        (value, places), gradients = jax.value_and_grad(loss, has_aux=True)(
            weights, _part(batch, k)
        )
        total = _add(total, (value, gradients))
        first = places if k == 0 else first
    return _moved(weights, total), first


def with_keys_of_the_hardware(weights, batch):
    keys = jax.random.split(jax.random.key(1, impl="rbg"), ROUNDS)
    parts = jax.tree.map(lambda x: x.reshape(ROUNDS, SIZE, *x.shape[1:]), batch)

    def round_(total, scanned):
        part, key = scanned
        noise = jax.random.normal(key, (WIDTH,))
        return _add(total, _gradient(weights, part, noise)), None

    return _moved(weights, jax.lax.scan(round_, _zeros(weights), (parts, keys))[0])


RIGHT = [
    in_front_of_a_scan,
    with_the_noise_of_the_last_in_all,
    clipped_and_weighted,
    under_a_condition_on_the_first,
    as_a_running_mean,
    with_keys_of_the_hardware,
    of_recomputed_layers_in_bfloat16,
    of_every_fourth_example,
    in_front_of_a_loop,
    one_after_the_other,
    of_split_arrays,
    with_keys_of_their_own,
    inside_the_loss,
]


def _each_after_the_other(weights, batch):
    for k in range(ROUNDS):
        loss, gradients = _gradient(weights, _part(batch, k))
        weights = [w - RATE * g for w, g in zip(weights, gradients, strict=True)]
    return weights, loss


def _of_another_loss_in_the_last(weights, batch):
    total = _zeros(weights)
    for k in range(ROUNDS):
        noise = 0.0 if k < ROUNDS - 1 else jnp.mean(_part(batch, k)["y"])
        total = _add(total, _gradient(weights, _part(batch, k), noise))
    return _moved(weights, total)


def _with_what_is_added_up_so_far(weights, batch):
    total = _zeros(weights)
    for k in range(ROUNDS):
        total = _add(total, _gradient(weights, _part(batch, k)))
        so_far = total
        if k == 1:
            half = so_far
    return _moved(weights, total), half[1]


def _require_right(step, options):
    expected = jax.jit(step)(_state(), _batch())
    ours = alpa.parallelize(step, cluster="host:4", options=alpa.Options(cache=False, **options))
    found = ours(_state(), _batch())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.sample("step", "options", step=9)
@pytest.mark.parametrize("options", [{}, {"num_stages": 2, "num_microbatches": 2}])
@pytest.mark.parametrize("step", RIGHT)
def test_written_out_rounds_are_cut_like_a_step_without(step, options):
    _require_right(step, options)
    counts = Step(step, (_state(), _batch())).microbatch_counts
    assert counts == ((1, 2, 3, 6) if step is of_every_fourth_example else (1, 2, 4))


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(_each_after_the_other, marks=pytest.mark.bulk),
        _of_another_loss_in_the_last,
        _with_what_is_added_up_so_far,
    ],
)
def test_rounds_that_are_not_equal_or_not_only_added_up_are_not_cut_and_right(step):
    with pytest.raises(alpa.PlanError, match="2 microbatches would change the result"):
        _require_right(step, {"num_microbatches": 2})
    _require_right(step, {})


def test_what_only_the_first_round_tells_is_right():
    _require_right(with_more_told_of_the_first, {})
    program = Step(with_more_told_of_the_first, (_state(), _batch()))
    parts = parts_by_rounds(program.traced(None)[0])[ROUNDS]
    found = with_equal_rounds_at_once(program.traced(None)[0], parts)
    assert found is not None
    plain = jax.jit(with_more_told_of_the_first)(_state(), _batch())
    args = jax.tree.leaves((_state(), _batch()))
    for a, b in zip(jaxpr_as_fun(found)(*args), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def test_all_rounds_at_once_have_the_equations_of_one():
    one = Step(lambda w, b: _moved(w, _gradient(w, b)), (_state(), _batch()))
    every = Step(one_after_the_other, (_state(), _batch()))
    assert len(every.whole.closed.jaxpr.eqns) < 1.5 * len(one.whole.closed.jaxpr.eqns)
