"""Training steps that accumulate gradients themselves, as public training code does it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from library_programs.batches import EXAMPLES, WIDTH, images, points
from library_programs.optax_transforms import _apply, _mlp

ROUNDS = 4


def _loss_of_points(params, batch):
    return jnp.mean(optax.huber_loss(_apply(params, batch["x"])[:, 0], batch["y"]))


def _stepped(gradient_of, params, batch):
    """Return a program whose step follows the gradient of `gradient_of(params, batch, key)`."""
    transform = optax.adamw(1e-2, eps=1e-3)

    def step(state, batch):
        params, opt_state, key = state
        key, own = jax.random.split(key)
        loss, grads = gradient_of(params, batch, own)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    return step, (params, transform.init(params), jax.random.key(0)), batch


def first_round_in_front():
    """big_vision's accumulate_gradient: the first slice, then a loop over the others."""

    def loss_fn(params, images, labels):
        logits = _apply(params, images.reshape(images.shape[0], -1))
        return jnp.mean(optax.softmax_cross_entropy(logits, labels))

    def accumulate_gradient(params, batch, _):
        images, labels = batch["image"], jax.nn.one_hot(batch["label"], 4)
        loss_and_grad_fn = jax.value_and_grad(loss_fn)
        step_size = images.shape[0] // ROUNDS
        l, g = loss_and_grad_fn(params, images[:step_size], labels[:step_size])

        def acc_grad_and_loss(i, l_and_g):
            imgs = jax.lax.dynamic_slice(
                images, (i * step_size, 0, 0, 0), (step_size, *images.shape[1:])
            )
            lbls = jax.lax.dynamic_slice(labels, (i * step_size, 0), (step_size, labels.shape[1]))
            li, gi = loss_and_grad_fn(params, imgs, lbls)
            l, g = l_and_g
            return (l + li, jax.tree.map(lambda x, y: x + y, g, gi))

        l, g = jax.lax.fori_loop(1, ROUNDS, acc_grad_and_loss, (l, g))
        return jax.tree.map(lambda x: x / ROUNDS, (l, g))

    return _stepped(accumulate_gradient, _mlp((64, 8, 4)), images())


def first_round_told_by_a_condition():
    """T5X' accumulate_grads_microbatched: sums of losses, metrics merged but in the first round."""

    def loss_fn(params, batch, key):
        kept = jax.random.bernoulli(key, 0.9, batch["x"].shape)
        found = _apply(params, batch["x"] * kept)[:, 0]
        weights = (batch["y"] > 0).astype(jnp.float32)
        loss = jnp.sum(weights * (found - batch["y"]) ** 2)
        return loss, {"loss": loss, "weights": weights.sum()}

    def accumulate(params, batch, key):
        size = EXAMPLES // ROUNDS
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

        def per_microbatch(loop_cnt, state):
            key, grad_accum, before = state
            key, own = jax.random.split(key)
            mbatch = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, loop_cnt * size, size), batch
            )
            (_, metrics), grad = grad_fn(params, mbatch, own)
            metrics = jax.lax.cond(
                loop_cnt == 0,
                lambda _: metrics,
                lambda _: jax.tree.map(jnp.add, before, metrics),
                None,
            )
            return key, jax.tree.map(jnp.add, grad_accum, grad), metrics

        zeros = {"loss": jnp.float32(0), "weights": jnp.float32(0)}
        first = key, jax.tree.map(jnp.zeros_like, params), zeros
        _, grads, metrics = jax.lax.fori_loop(0, ROUNDS, per_microbatch, first)
        return metrics, jax.tree.map(lambda g: g / metrics["weights"], grads)

    return _stepped(accumulate, _mlp((WIDTH, 8, 1)), points())


def rounds_of_examples_that_lie_apart():
    """MaxText's gradient accumulation: a scan over every n-th example, weighted by their tokens."""

    def loss_fn(params, data):
        weights = (data["y"] > 0).astype(jnp.float32)
        losses = (_apply(params, data["x"])[:, 0] - data["y"]) ** 2
        total = jnp.sum(losses * weights)
        count = weights.sum()
        return total / (count + 1e-6), {"total_loss": total, "total_weights": count}

    def reshaped(x):
        apart = jnp.reshape(x, (x.shape[0] // ROUNDS, ROUNDS, *x.shape[1:]))
        return jnp.swapaxes(apart, 0, 1)

    def accumulate(params, batch, _):
        grad_func = jax.value_and_grad(loss_fn, has_aux=True)

        def accumulate_gradient(acc, data):
            (_, aux), grad = grad_func(params, data)
            acc["loss"] += aux["total_loss"]
            acc["grad"] = jax.tree.map(lambda x, y: x * aux["total_weights"] + y, grad, acc["grad"])
            acc["total_weights"] += aux["total_weights"]
            return acc, aux

        data = jax.tree.map(reshaped, batch)
        first = {"loss": 0.0, "grad": jax.tree.map(jnp.zeros_like, params), "total_weights": 0.0}
        acc, aux = jax.lax.scan(accumulate_gradient, first, data, length=ROUNDS)
        grads = jax.tree.map(lambda g: g / acc["total_weights"], acc["grad"])
        return {"loss": acc["loss"], "aux": jax.tree.map(lambda x: x.sum(0), aux)}, grads

    return _stepped(accumulate, _mlp((WIDTH, 8, 1)), points())


def optax_microbatches(accumulation="MEAN"):
    """optax.microbatching.microbatch around value_and_grad."""
    gradient_of = optax.microbatching.microbatch(
        jax.value_and_grad(_loss_of_points),
        argnums=1,
        microbatch_size=EXAMPLES // ROUNDS,
        accumulator=optax.microbatching.AccumulationType[accumulation],
    )
    return _stepped(
        lambda params, batch, _: gradient_of(params, batch), _mlp((WIDTH, 8, 1)), points()
    )


optax_running_means = functools.partial(optax_microbatches, "RUNNING_MEAN")


def optax_gradients_of_each():
    """optax.microbatching.micro_grad: gradients of each example, clipped and averaged in rounds."""

    def loss_fn(params, batch):
        return jnp.mean(optax.huber_loss(_apply(params, batch["x"])[:, 0], batch["y"]))

    gradient_of = optax.microbatching.micro_grad(
        loss_fn,
        batch_argnums=1,
        microbatch_size=EXAMPLES // ROUNDS,
        accumulator=optax.microbatching.AccumulationType.MEAN,
        transform_fn=lambda g: optax.projections.projection_l2_ball(g, 0.5),
        metrics_fn=optax.tree.norm,
    )

    def accumulate(params, batch, _):
        grads, aux = gradient_of(params, batch)
        return {"loss": aux.values.mean(), "norm": aux.metrics.mean()}, grads

    return _stepped(accumulate, _mlp((WIDTH, 8, 1)), points())


def nnx_rounds_written_out():
    """Gradients of a module, added up in a loop of Python over parts of the batch."""
    model = nnx.Sequential(
        nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0)), jax.nn.relu, nnx.Linear(8, 1, rngs=nnx.Rngs(1))
    )
    graph, params = nnx.split(model)
    batch = points()

    def accumulate(params, batch, _):
        model = nnx.merge(graph, params)
        xs, ys = (jnp.split(batch[name], ROUNDS) for name in ("x", "y"))
        losses, grads = [], None
        for x, y in zip(xs, ys, strict=True):
            loss, own = nnx.value_and_grad(lambda m, x, y: jnp.mean((m(x)[:, 0] - y) ** 2))(
                model, x, y
            )
            losses.append(loss)
            grads = own if grads is None else jax.tree.map(jnp.add, grads, own)
        return jnp.stack(losses), jax.tree.map(lambda g: g / ROUNDS, grads)

    return _stepped(accumulate, params, batch)
