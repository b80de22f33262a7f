"""Training steps in the idiom of optax' examples: transformations, losses, gradients apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from library_programs.batches import EXAMPLES, WIDTH, images, points


def _mlp(sizes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    return {
        f"layer{k}": {"w": jax.random.normal(key, (i, o)) / np.sqrt(i), "b": jnp.zeros(o)}
        for k, (key, i, o) in enumerate(zip(keys, sizes, sizes[1:], strict=False))
    }


def _apply(params, x):
    *hidden, last = params.values()
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def differential_privacy():
    """Per-example gradients, clipped and summed, with noise of a key in the optimiser's state."""
    params, batch = _mlp((64, 8, 4)), images()
    transform = contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, seed=42)

    def loss_fn(params, batch):
        logits = _apply(params, batch["image"].reshape(batch["image"].shape[0], -1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def step(state, batch):
        params, opt_state = state
        apart = jax.tree.map(lambda x: x[:, None], batch)
        per_example = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, apart)
        updates, opt_state = transform.update(per_example, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss_fn(params, batch)

    return step, (params, transform.init(params)), batch


def differential_privacy_by_hand():
    """Clip factors from per-example norms, one sum of clipped gradients, noise for each leaf."""
    params, batch = _mlp((WIDTH, 8, 1)), points()

    def loss_fn(params, x, y):
        return (_apply(params, x)[0] - y) ** 2

    def step(state, batch):
        params, key = state
        key, own = jax.random.split(key)
        losses, grads = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0, 0))(
            params, batch["x"], batch["y"]
        )
        leaves, tree = jax.tree.flatten(grads)
        norms = jnp.sqrt(sum(jnp.sum(g**2, axis=tuple(range(1, g.ndim))) for g in leaves))
        factor = jnp.minimum(1.0, 0.5 / (norms + 1e-6))
        summed = [jnp.einsum("n,n...->...", factor, g) for g in leaves]
        keys = jax.random.split(own, len(leaves))
        noisy = [
            (s + 0.1 * jax.random.normal(k, s.shape)) / batch["x"].shape[0]
            for s, k in zip(summed, keys, strict=True)
        ]
        params = optax.tree.add_scale(params, -0.1, jax.tree.unflatten(tree, noisy))
        clipped = jnp.mean(norms > 0.5)
        return (params, key), {"loss": losses.mean(), "norm": norms.mean(), "clipped": clipped}

    return step, (params, jax.random.key(0)), batch


def accumulated_and_finite():
    """MultiSteps around apply_if_finite around transformations by label; an average of params."""
    params, batch = _mlp((WIDTH, 8, 1)), points()
    labels = {
        name: {leaf: "decayed" if leaf == "w" else "plain" for leaf in layer}
        for name, layer in params.items()
    }
    inner = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.multi_transform(
            {"decayed": optax.adamw(1e-2, eps=1e-3), "plain": optax.sgd(1e-2, momentum=0.9)},
            labels,
        ),
    )
    transform = optax.MultiSteps(optax.apply_if_finite(inner, 3), every_k_schedule=2)
    average = optax.ema(0.9)

    def loss_fn(params, batch):
        return jnp.mean(optax.huber_loss(_apply(params, batch["x"])[:, 0], batch["y"]))

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = transform.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        _, averaged = average.update(params, state["average"])
        return {"params": params, "opt_state": opt_state, "average": averaged}, loss

    state = {"params": params, "opt_state": transform.init(params), "average": average.init(params)}
    return step, state, batch


def adversarial_training():
    """Inputs moved along the sign of their own gradient for some steps, then trained on."""
    params, batch = _mlp((WIDTH, 8, 1)), points()
    transform = optax.adam(1e-2, eps=1e-3)

    def loss_fn(params, batch):
        decay = 1e-4 * optax.tree.norm(params, squared=True)
        logits = _apply(params, batch["x"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["y"] > 0).mean() + decay

    def attacked(params, batch):
        def advance(_, x):
            gradient = jax.grad(lambda x: loss_fn(params, {**batch, "x": x}))(x)
            x = x + 0.02 * jnp.sign(gradient)
            return batch["x"] + jnp.clip(x - batch["x"], -0.05, 0.05)

        return jax.lax.fori_loop(0, 3, advance, batch["x"])

    def step(state, batch):
        params, opt_state = state
        moved = {**batch, "x": attacked(params, batch)}
        loss, grads = jax.value_and_grad(loss_fn)(params, moved)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch


def meta_learning():
    """Each example is a task: gradient steps on its support set, the loss on its query set."""
    draw = np.random.default_rng(0)
    values = [jnp.asarray(draw.normal(size=(EXAMPLES, 5, 1)).astype("float32")) for _ in range(4)]
    params = _mlp((1, 8, 1))
    transform = optax.adam(1e-2, eps=1e-3)

    def loss_fn(params, x, y):
        return jnp.mean((_apply(params, x) - y) ** 2)

    def task_loss(params, support_x, support_y, query_x, query_y):
        for _ in range(2):
            gradient = jax.grad(loss_fn)(params, support_x, support_y)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        return loss_fn(params, query_x, query_y)

    def step(state, batch):
        params, opt_state = state

        def meta_loss(params):
            return jax.vmap(task_loss, in_axes=(None, 0, 0, 0, 0))(params, *batch).mean()

        loss, grads = jax.value_and_grad(meta_loss)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), tuple(values)


def hessian_diagonal():
    """Sophia: a Hutchinson estimate of the curvature every other step, clipped momentum."""
    params, batch = _mlp((WIDTH, 8, 1)), points()

    def loss_fn(params, batch):
        return jnp.mean((_apply(params, batch["x"])[:, 0] - batch["y"]) ** 2)

    def step(state, batch):
        gradient_fn = jax.grad(loss_fn)
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        key, own = jax.random.split(state["key"])
        probe = optax.tree.random_like(own, state["params"], jax.random.rademacher)
        probe = jax.tree.map(lambda x: x.astype(jnp.float32), probe)
        _, product = jax.jvp(lambda p: gradient_fn(p, batch), (state["params"],), (probe,))
        momentum = optax.tree.update_moment(grads, state["momentum"], 0.9, 1)
        curvature = jax.tree.map(
            lambda h, p, v: jnp.where(state["step"] % 2 == 0, 0.9 * h + 0.1 * p * v, h),
            state["curvature"],
            product,
            probe,
        )
        params = jax.tree.map(
            lambda p, m, h: p - 0.02 * jnp.clip(m / jnp.maximum(h, 1e-2), -1.0, 1.0),
            state["params"],
            momentum,
            curvature,
        )
        new = {"params": params, "momentum": momentum, "curvature": curvature}
        return {**new, "key": key, "step": state["step"] + 1}, loss

    zeros = optax.tree.zeros_like(params)
    state = {"params": params, "momentum": zeros, "curvature": zeros}
    return step, {**state, "key": jax.random.key(3), "step": jnp.int32(0)}, batch


def ranking():
    """Lists of documents of unlike lengths, a softmax over the valid ones, a weight per list."""
    draw = np.random.default_rng(0)
    batch = {
        "features": jnp.asarray(draw.normal(size=(EXAMPLES, 5, WIDTH)).astype("float32")),
        "relevance": jnp.asarray(draw.integers(0, 3, (EXAMPLES, 5)).astype("float32")),
        "valid": jnp.asarray(np.arange(5) < 2 + np.arange(EXAMPLES)[:, None] % 4),
        "weight": jnp.asarray(draw.uniform(size=EXAMPLES).astype("float32")),
    }
    params = _mlp((WIDTH, 8, 1))
    transform = optax.adagrad(0.05)

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            scores = 3.0 * jnp.tanh(_apply(params, batch["features"])[..., 0])
            losses = optax.losses.ranking_softmax_loss(
                scores, batch["relevance"], where=batch["valid"], reduce_fn=None
            )
            return jnp.average(losses, weights=batch["weight"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch


def connectionist_temporal_classification():
    """The CTC loss of padded frames and padded labels."""
    draw = np.random.default_rng(0)
    frames, labels = np.arange(6), np.arange(3)
    batch = {
        "frames": jnp.asarray(draw.normal(size=(EXAMPLES, 6, WIDTH)).astype("float32")),
        "frame_padding": jnp.asarray((frames >= 4 + np.arange(EXAMPLES)[:, None] % 3) * 1.0),
        "labels": jnp.asarray(draw.integers(1, 5, (EXAMPLES, 3))),
        "label_padding": jnp.asarray((labels >= 1 + np.arange(EXAMPLES)[:, None] % 2) * 1.0),
    }
    params = _mlp((WIDTH, 8, 5))
    transform = optax.novograd(1e-2)

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            logits = _apply(params, batch["frames"])
            losses = optax.ctc_loss(
                logits, batch["frame_padding"], batch["labels"], batch["label_padding"]
            )
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch


def contrastive_pairs():
    """CLIP: every image against every text of the batch, a temperature that is learnt."""
    draw = np.random.default_rng(0)
    batch = {
        "image": jnp.asarray(draw.normal(size=(EXAMPLES, WIDTH)).astype("float32")),
        "text": jnp.asarray(draw.normal(size=(EXAMPLES, WIDTH)).astype("float32")),
    }
    params = {"image": _mlp((WIDTH, 4), 0), "text": _mlp((WIDTH, 4), 1), "scale": jnp.float32(1.0)}
    transform = optax.lion(1e-3)

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            image, text = (_apply(params[name], batch[name]) for name in ("image", "text"))
            image = image / jnp.linalg.norm(image, axis=-1, keepdims=True)
            text = text / jnp.linalg.norm(text, axis=-1, keepdims=True)
            logits = jnp.exp(params["scale"]) * image @ text.T
            labels = jnp.arange(logits.shape[0])
            one = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            other = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels).mean()
            return (one + other) / 2

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch


def sharpness_aware():
    """SAM: the gradient at the parameters moved along the gradient of the whole batch."""
    params, batch = _mlp((WIDTH, 8, 1)), points()
    transform = optax.sgd(0.05)

    def loss_fn(params, batch):
        return jnp.mean((_apply(params, batch["x"])[:, 0] - batch["y"]) ** 2)

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        scale = 0.05 / (optax.tree.norm(grads) + 1e-6)
        moved = optax.tree.add_scale(params, scale, grads)
        updates, opt_state = transform.update(jax.grad(loss_fn)(moved, batch), opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch


def soft_actor_critic():
    """SAC: the actor's loss reads the critic that this step has trained, the temperature's loss the
    actor's entropy; target networks follow."""
    draw = np.random.default_rng(0)
    shapes = {"state": (WIDTH,), "next_state": (WIDTH,), "action": (2,), "reward": (), "ends": ()}
    batch = {
        name: jnp.asarray(draw.normal(size=(EXAMPLES, *shape)).astype("float32"))
        for name, shape in shapes.items()
    }
    batch["ends"] = (batch["ends"] > 1).astype(jnp.float32)
    critics = [_mlp((WIDTH + 2, 16, 1), seed) for seed in (1, 2)]
    params = {"actor": _mlp((WIDTH, 16, 4)), "critic": critics, "temperature": jnp.zeros(())}
    transform = optax.adam(1e-2, eps=1e-3)

    def act(actor, observed, key):
        mean, log_std = jnp.split(_apply(actor, observed), 2, axis=-1)
        drawn = jax.random.normal(key, mean.shape)
        action = jnp.tanh(mean + jnp.exp(jnp.clip(log_std, -5, 2)) * drawn)
        density = -0.5 * drawn**2 - log_std - jnp.log(1 - action**2 + 1e-6)
        return action, density.sum(-1)

    def value(critics, observed, action):
        both = jnp.concatenate([observed, action], axis=-1)
        return jnp.stack([_apply(critic, both)[:, 0] for critic in critics])

    def step(state, batch):
        params, opt_states, key = state["params"], state["opt_states"], state["key"]
        key, next_key, own_key = jax.random.split(key, 3)
        temperature = jnp.exp(params["temperature"])
        action, density = act(params["actor"], batch["next_state"], next_key)
        after = value(state["target"], batch["next_state"], action).min(0) - temperature * density
        wanted = jax.lax.stop_gradient(batch["reward"] + 0.99 * (1 - batch["ends"]) * after)

        def critic_loss(critic):
            found = value(critic, batch["state"], batch["action"])
            return jnp.mean((found - wanted) ** 2)

        def actor_loss(actor):
            action, density = act(actor, batch["state"], own_key)
            gain = value(new["critic"], batch["state"], action).min(0)
            return jnp.mean(temperature * density - gain), -density.mean()

        def temperature_loss(log_temperature):
            entropy = losses["actor"][1]
            return jnp.exp(log_temperature) * jax.lax.stop_gradient(entropy + 2.0)

        new, new_states, losses = dict(params), dict(opt_states), {}
        for name, loss_fn, has_aux in [
            ("critic", critic_loss, False),
            ("actor", actor_loss, True),
            ("temperature", temperature_loss, False),
        ]:
            losses[name], grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params[name])
            updates, new_states[name] = transform.update(grads, opt_states[name])
            new[name] = optax.apply_updates(params[name], updates)
        target = optax.incremental_update(new["critic"], state["target"], 0.05)
        return {"params": new, "opt_states": new_states, "target": target, "key": key}, losses

    state = {
        "params": params,
        "opt_states": {name: transform.init(one) for name, one in params.items()},
        "target": critics,
        "key": jax.random.key(0),
    }
    return step, state, batch
