"""Steps cut into microbatches compute what the whole batch does, for the losses people write."""

import functools
import math

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from cut_steps import in_microbatches, step_of
from jax.core import ShapedArray
from jax.interpreters import batching, mlir

import alpa_meta as alpa
from alpa_meta.compat import shape_of
from alpa_meta.step.program import Step

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "a": jnp.asarray(RANDOM.normal(size=(6, 8)), jnp.float32),
    "b": jnp.asarray(RANDOM.normal(size=(8, 6)), jnp.float32),
}
BATCH = {
    "x": jnp.asarray(RANDOM.normal(size=(8, 3, 6)), jnp.float32),
    "y": jnp.asarray(RANDOM.integers(0, 6, (8, 3)), jnp.int32),
    "mask": jnp.asarray(RANDOM.uniform(size=(8, 3)) > 0.3, jnp.float32),
}


def model(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def entropy(w, batch):
    logits = jax.nn.log_softmax(model(w, batch["x"]))
    return -jnp.take_along_axis(logits, batch["y"][..., None], -1)[..., 0]


def entropy_mean(w, batch):
    return entropy(w, batch).mean()


def masked(w, batch):
    return (entropy(w, batch) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)


def weighted(w, batch):
    return (entropy(w, batch) * (batch["mask"] / batch["mask"].sum())).sum()


def penalised(w, batch):
    return entropy(w, batch).mean() + 1e-2 * sum(jnp.sum(v**2) for v in w.values())


def normalised_advantages(w, batch):
    advantages = (batch["mask"] - batch["mask"].mean()) / (batch["mask"].std() + 1e-6)
    return (entropy(w, batch) * advantages).mean()


def root_of_mean(w, batch):
    return jnp.sqrt(jnp.mean((model(w, batch["x"]) - batch["x"]) ** 2))


def weighted_by_the_model(w, batch):
    weights = jax.nn.sigmoid(model(w, batch["x"])[..., 0])
    return (entropy(w, batch) * weights).sum() / weights.sum()


def balanced_experts(w, batch):
    router = jax.nn.softmax(batch["x"] @ w["a"][:, :4])
    share = jax.nn.one_hot(router.argmax(-1), 4).mean((0, 1))
    return entropy(w, batch).mean() + 0.1 * jnp.sum(share * router.mean((0, 1)))


def dropped_out(w, batch):
    hidden = jnp.tanh(batch["x"] @ w["a"])
    kept = jax.random.bernoulli(jax.random.key(7), 0.8, hidden.shape)
    return jnp.mean((jnp.where(kept, hidden / 0.8, 0.0) @ w["b"] - batch["x"]) ** 2)


def a_key_for_each_example(w, batch):
    def one(x, key):
        return jnp.mean((model(w, x + jax.random.normal(key, x.shape)) - x) ** 2)

    return jax.vmap(one)(batch["x"], jax.random.split(jax.random.key(3), 8)).mean()


def shuffled(w, batch):
    other = batch["x"][jax.random.permutation(jax.random.key(3), 8)]
    mixed = 0.6 * batch["x"] + 0.4 * other
    return jnp.mean((model(w, mixed) - mixed) ** 2)


def counted_places(w, batch):
    logits = jax.nn.log_softmax(model(w, batch["x"])[:, 0])
    return -(logits[jnp.arange(8), batch["y"][:, 0]] * jnp.arange(8.0)).sum()


def over_time(w, batch):
    def trip(carry, given):
        x, key = given
        carry = jnp.tanh(carry + x @ w["a"]) * jax.random.bernoulli(key, 0.9, carry.shape)
        return carry, carry @ w["b"]

    keys = jax.random.split(jax.random.key(1), 3)
    _, out = jax.lax.scan(trip, jnp.zeros((8, 8)), (batch["x"].swapaxes(0, 1), keys))
    return ((out.swapaxes(0, 1) - batch["x"]) ** 2 * batch["mask"][..., None]).sum() / 8


def time_major(w, batch):
    x = batch["x"].swapaxes(0, 1).reshape(24, 6)
    errors = ((model(w, x) - x) ** 2).mean(-1) * batch["mask"].T.reshape(24)
    return (errors * jnp.arange(24.0)).sum() / batch["mask"].sum()


def recomputed(w, batch):
    return jax.checkpoint(dropped_out)(w, batch)


def loops_that_end_at_different_times(w, batch):
    def root(x):
        going_on, trip = (
            lambda c: jnp.abs(c[0] - c[1]) > 1e-3,
            lambda c: (c[0] / 2 + x / c[0] / 2, c[0]),
        )
        return jax.lax.while_loop(going_on, trip, (x, x + 1))[0]

    roots = jax.vmap(root)(1 + jnp.abs(batch["x"][:, 0, 0]))
    return (entropy(w, batch) * jax.lax.stop_gradient(roots)[:, None]).mean()


unvmap_any = jex.Primitive("unvmap_any")
"""Equinox' primitive: whether any holds, over the dims of jax.vmap as well."""
unvmap_any.def_impl(lambda x: jnp.any(x))
unvmap_any.def_abstract_eval(lambda x: ShapedArray((), np.dtype(bool)))
batching.primitive_batchers[unvmap_any] = lambda args, _: (unvmap_any.bind(*args), None)
mlir.register_lowering(unvmap_any, mlir.lower_fun(lambda x: jnp.any(x), multiple_results=False))


def halvings(x, any_of=unvmap_any.bind):
    """Return x halved until it is small, and the trips of all examples together."""

    def trip(carry):
        x, going_on, trips = carry
        after = jnp.where(going_on, x / 2, x)
        return after, going_on & (after > 0.3), trips + 1

    start = (x, x > 0.3, 0)
    return jax.lax.while_loop(lambda carry: any_of(carry[1]), trip, start)


def loops_steered_by_all_examples(w, batch):
    small = jax.vmap(lambda x: halvings(x)[0])(jnp.abs(batch["x"][:, 0, 0]))
    return (entropy(w, batch) * small[:, None]).mean()


EXACT = [
    masked,
    weighted,
    penalised,
    normalised_advantages,
    root_of_mean,
    weighted_by_the_model,
    balanced_experts,
    dropped_out,
    a_key_for_each_example,
    shuffled,
    counted_places,
    over_time,
    time_major,
    recomputed,
    loops_that_end_at_different_times,
    loops_steered_by_all_examples,
]


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("count", [4, 2])
@pytest.mark.parametrize("loss", EXACT)
def test_microbatches_compute_what_the_whole_batch_does(loss, count):
    step = step_of(loss)
    with jax.enable_x64(True):
        args = jax.tree.map(
            lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, (WEIGHTS, BATCH)
        )
        expected = jax.jit(step)(*args)
        found = jax.jit(functools.partial(in_microbatches, step, count))(*args)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12),
            found,
            expected,
        )


def sharpness_aware(w, batch):
    first = jax.grad(entropy_mean)(w, batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in first.values()))
    return step_of(entropy_mean)(jax.tree.map(lambda p, g: p + 0.1 * g / norm, w, first), batch)


def actor_after_critic(w, batch):
    def error(b):
        return jnp.mean((batch["x"] @ w["a"] @ b - batch["x"]) ** 2)

    critic = w["b"] - 0.1 * jnp.tanh(jax.grad(error)(w["b"]))
    loss, gradient = jax.value_and_grad(lambda a: jnp.mean(jnp.sin(batch["x"] @ a @ critic)))(
        w["a"]
    )
    return {"a": w["a"] - 0.1 * gradient, "b": critic}, loss


def generator_after_discriminator(w, batch):
    noise = jax.random.normal(jax.random.key(0), batch["x"].shape[:1] + (6,))

    def difference(b, a):
        return jnp.mean(jax.nn.softplus(noise @ a @ b)) - jnp.mean(
            jnp.tanh(batch["x"] @ w["a"] @ b)
        )

    against = w["b"] - 0.1 * jnp.tanh(jax.grad(difference)(w["b"], w["a"]))
    loss, gradient = alpa.value_and_grad(lambda a: jnp.mean(jnp.tanh(noise @ a @ against)))(w["a"])
    return {"a": w["a"] - 0.1 * gradient, "b": against}, loss


def agrees_in_four_microbatches(step):
    expected = jax.jit(step)(WEIGHTS, BATCH)
    found = jax.jit(functools.partial(in_microbatches, step, 4))(WEIGHTS, BATCH)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


def generator_of_noise_after_discriminator(w, batch):
    """The generator's gradient, not its loss, is all that reads the discriminator's last layer."""

    def score(d, x):
        return jnp.tanh(x @ d["first"]) @ d["last"]

    def made(a):
        return jax.random.normal(jax.random.key(1), (8, 6)) @ a

    def discriminate(d):
        return jnp.mean(score(d, made(w["a"]))) - jnp.mean(score(d, batch["x"] @ w["a"]))

    discriminator = {"first": w["b"], "last": w["a"][:, 0]}
    gradient = jax.grad(discriminate)(discriminator)
    moved = jax.tree.map(lambda d, g: d - 0.1 * g**2, discriminator, gradient)
    loss, gradient = jax.value_and_grad(lambda a: -jnp.mean(score(moved, made(a))))(w["a"])
    return {"a": w["a"] - 0.1 * gradient, "b": moved["first"] + moved["last"].sum()}, loss


@pytest.mark.parametrize(
    "step",
    [
        sharpness_aware,
        actor_after_critic,
        generator_after_discriminator,
        generator_of_noise_after_discriminator,
    ],
)
def test_a_loss_reads_what_the_gradient_of_an_earlier_one_has_moved(step):
    agrees_in_four_microbatches(step)


def test_a_third_loss_after_two_updates_is_refused_with_the_line():
    def twice(w, batch):
        moved, _ = sharpness_aware(w, batch)
        return sharpness_aware(moved, batch)

    (reason,) = Step(twice, (WEIGHTS, BATCH)).program(2).inexact
    assert "depends on parameters and, in turn, on such a sum" in reason
    assert "test_cut.py" in reason


def searched(w, batch):
    """The longest of some steps that does not raise the loss."""
    value, gradients = jax.value_and_grad(entropy_mean)(w, batch)
    gradients = jax.tree.map(jnp.tanh, gradients)

    def moved(length):
        return jax.tree.map(lambda p, g: p - length * g, w, gradients)

    length = jax.lax.while_loop(
        lambda length: entropy_mean(moved(length), batch) > value, lambda length: length / 2, 64.0
    )
    return moved(length), value


def weighed_by_clipped_norms(w, batch):
    """Gradients of each example, which the median of their norms clips."""
    each = jax.vmap(jax.grad(lambda w, x: jnp.mean(model(w, x) ** 2)), in_axes=(None, 0))
    gradients = each(w, batch["x"])
    norms = jnp.sqrt(sum(jnp.sum(g**2, axis=(1, 2)) for g in jax.tree.leaves(gradients)))
    share = jnp.minimum(1.0, jnp.median(norms) / norms)[:, None, None]
    return jax.tree.map(lambda p, g: p - 0.1 * (share * g).mean(0), w, gradients), norms.max()


def actor_after_critic_every_second_step(w, batch):
    """TD3: a condition that holds the whole of the actor's loss, gradient and update."""

    def error(b):
        return jnp.mean((batch["x"] @ w["a"] @ b - batch["x"]) ** 2)

    value, gradient = jax.value_and_grad(error)(w["b"])
    critic = w["b"] - 0.1 * jnp.tanh(gradient)

    def updated():
        return w["a"] - jax.grad(lambda a: jnp.mean(jnp.sin(batch["x"] @ a @ critic)))(w["a"])

    return {"a": jax.lax.cond(w["b"][0, 0] > -9, updated, lambda: w["a"]), "b": critic}, value


@pytest.mark.parametrize(
    "step", [searched, weighed_by_clipped_norms, actor_after_critic_every_second_step]
)
def test_an_update_is_given_the_whole_of_the_examples_that_it_works_on(step):
    agrees_in_four_microbatches(step)


def test_an_update_that_works_on_random_keys_of_the_examples_is_refused_with_the_line():
    def step(w, batch):
        gradient = jax.grad(lambda w: (batch["x"] @ w).mean())(w)
        number = jnp.sum(jnp.tanh(gradient) > 0)
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch["keys"], number)
        noise = jax.vmap(lambda key: jax.random.normal(key, w.shape))(keys)
        return w - gradient * noise.mean(0)

    batch = {"x": BATCH["x"], "keys": jax.random.split(jax.random.key(0), 8)}
    (reason,) = Step(step, (WEIGHTS["a"], batch), batch_argnums=(1,)).program(2).inexact
    assert "test_cut.py" in reason
    assert "works on the examples of the batch after the update" in reason


def normalised_over_the_batch(w, batch):
    hidden = batch["x"] @ w["a"]
    hidden = (hidden - hidden.mean((0, 1))) / jnp.sqrt(hidden.var((0, 1)) + 1e-5)
    return jnp.mean((hidden @ w["b"] - batch["x"]) ** 2)


def contrasted(w, batch):
    left, right = model(w, batch["x"][:, 0]), model(w, batch["x"][:, 1])
    return -jnp.diag(jax.nn.log_softmax(left @ right.T)).mean()


def test_layers_behind_batch_statistics_are_refused_with_the_line():
    (reason,) = Step(step_of(normalised_over_the_batch), (WEIGHTS, BATCH)).program(2).inexact
    assert "mixes examples of the batch" in reason
    assert "test_cut.py" in reason


def test_what_a_loss_takes_of_all_examples_is_put_together_and_read_whole():
    step = step_of(contrasted)
    program = Step(step, (WEIGHTS, BATCH)).program(4)
    assert not program.inexact
    kinds = [leaf.role for leaf in program.inputs]
    assert kinds.count("total") == 2
    shapes = {leaf.aval.shape for leaf in program.inputs if leaf.role == "total"}
    assert all(len(BATCH["x"]) in shape for shape in shapes)


@pytest.mark.parametrize("any_of", [unvmap_any.bind, jnp.any])
def test_the_trips_of_a_loop_over_all_examples_are_no_part_of_a_result(any_of):
    def step(w, batch):
        value, gradients = jax.value_and_grad(lambda w: entropy(w, batch).mean())(w)
        first = jnp.abs(w["a"][0, 0] * batch["x"][:, 0, 0])
        _, _, trips = halvings(first, any_of)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), (value, trips)

    (reason,) = Step(step, (WEIGHTS, BATCH)).program(2).inexact
    assert "how long the examples of the batch were worked on" in reason


def test_what_depends_on_the_batch_alone_is_computed_once():
    program = Step(step_of(masked), (WEIGHTS, BATCH)).program(4)
    (statistic,) = [leaf for leaf in program.inputs if leaf.role == "statistic"]
    assert statistic.aval.shape == ()
    assert not program.totals


def test_sums_that_depend_on_parameters_are_totals():
    program = Step(step_of(root_of_mean), (WEIGHTS, BATCH)).program(4)
    assert len(program.totals) == 1
    assert program.statistics is None


def test_random_bits_are_drawn_for_the_microbatch_only():
    program = Step(step_of(dropped_out), (WEIGHTS, BATCH)).program(4)
    drawn = [eqn for eqn in program.jaxpr.eqns if "random" in eqn.primitive.name]
    assert all(math.prod(shape_of(eqn.outvars[0])) <= 8 * 3 * 8 // 4 for eqn in drawn)
    assert program.inputs[-1].role == "number"
