"""Training steps in the idiom of haiku's examples: `hk.transform`, keys split by the step."""

from __future__ import annotations

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from library_programs.batches import VOCABULARY, WIDTH, images, padded_tokens


class TrainingState(NamedTuple):
    """What a step takes and returns."""

    params: hk.Params
    opt_state: optax.OptState
    rng: jax.Array
    step: jax.Array


def _start(params, transform):
    return TrainingState(params, transform.init(params), jax.random.PRNGKey(1), jnp.array(0))


def transformer():
    """Dropout by a legacy key that the step splits; a loss over unpadded tokens."""
    batch = padded_tokens()

    def forward(tokens):
        mask = (tokens > 0)[:, None, None, :] * jnp.tril(jnp.ones((1, 1, *tokens.shape[1:] * 2)))
        x = hk.Embed(VOCABULARY, WIDTH)(tokens)
        init = hk.initializers.VarianceScaling(1.0)
        for _ in range(2):
            y = hk.LayerNorm(-1, True, True)(x)
            y = hk.MultiHeadAttention(2, 4, model_size=WIDTH, w_init=init)(y, y, y, mask=mask)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, y)
            y = hk.nets.MLP([2 * WIDTH, WIDTH], activation=jax.nn.gelu)(
                hk.LayerNorm(-1, True, True)(x)
            )
            x = x + hk.dropout(hk.next_rng_key(), 0.1, y)
        return hk.Linear(VOCABULARY)(hk.LayerNorm(-1, True, True)(x))

    model = hk.transform(forward)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))

    def loss_fn(params, rng, batch):
        logits = model.apply(params, rng, batch["inputs"])
        one_hot = jax.nn.one_hot(batch["targets"], VOCABULARY)
        mask = jnp.greater(batch["inputs"], 0)
        log_likelihood = jnp.sum(one_hot * jax.nn.log_softmax(logits), axis=-1)
        return -jnp.sum(log_likelihood * mask) / jnp.sum(mask)

    def step(state, batch):
        rng, new_rng = jax.random.split(state.rng)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, rng, batch)
        updates, opt_state = transform.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return TrainingState(params, opt_state, new_rng, state.step + 1), {"loss": loss}

    return step, _start(model.init(jax.random.PRNGKey(0), batch["inputs"]), transform), batch


def recurrent_language_model():
    """An LSTM unrolled over time-major sequences with `hk.dynamic_unroll`."""
    batch = padded_tokens()

    def unroll(tokens):
        core = hk.DeepRNN(
            [hk.Embed(VOCABULARY, WIDTH), hk.LSTM(WIDTH), jax.nn.relu, hk.Linear(VOCABULARY)]
        )
        out, _ = hk.dynamic_unroll(core, tokens.T, core.initial_state(tokens.shape[0]))
        return out

    model: Any = hk.without_apply_rng(hk.transform(unroll))
    transform = optax.adam(1e-2, eps=1e-3)

    def loss_fn(params, batch):
        log_probs = jax.nn.log_softmax(model.apply(params, batch["inputs"]))
        one_hot = jax.nn.one_hot(batch["targets"].T, VOCABULARY)
        return -jnp.sum(one_hot * log_probs) / one_hot.shape[0] / one_hot.shape[1]

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = transform.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state, step=state.step + 1), loss

    return step, _start(model.init(jax.random.PRNGKey(0), batch["inputs"]), transform), batch


def vector_quantised_autoencoder():
    """A code book learnt by gradients: losses are means, the perplexity a function of one."""
    batch = images()["image"]

    def forward(image):
        z = hk.Conv2D(WIDTH, 4, 4)(image)
        vq = hk.nets.VectorQuantizer(WIDTH, 16, 0.25)(z, is_training=True)
        out = hk.Conv2DTranspose(1, 4, 4)(jax.nn.relu(vq["quantize"]))
        return out, vq["loss"], vq["perplexity"]

    model: Any = hk.without_apply_rng(hk.transform(forward))
    transform = optax.adam(3e-3, eps=1e-3)

    def loss_fn(params, image):
        out, vq_loss, perplexity = model.apply(params, image)
        error = jnp.mean((out - image) ** 2) / 0.08
        return error + vq_loss, {"error": error, "perplexity": perplexity}

    def step(state, image):
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, image)
        updates, opt_state = transform.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        new = state._replace(params=params, opt_state=opt_state, step=state.step + 1)
        return new, {"loss": loss, **aux}

    return step, _start(model.init(jax.random.PRNGKey(0), batch), transform), batch


def mnist_with_running_average():
    """A regularised mean loss, a running average of the parameters, and evaluation in the step."""
    batch = images()

    def forward(image):
        return hk.nets.MLP([16, 8, 4])(hk.Flatten()(image))

    model: Any = hk.without_apply_rng(hk.transform(forward))
    transform = optax.adam(1e-2, eps=1e-3)

    def loss_fn(params, batch):
        logits = model.apply(params, batch["image"])
        log_likelihood = jnp.sum(jax.nn.one_hot(batch["label"], 4) * jax.nn.log_softmax(logits))
        l2 = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return -log_likelihood / batch["image"].shape[0] + 1e-4 * l2

    def step(state, batch):
        params, average, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = transform.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, step_size=0.001)
        predicted = jnp.argmax(model.apply(average, batch["image"]), axis=-1)
        accuracy = jnp.mean(predicted == batch["label"])
        return (params, average, opt_state), {"loss": loss, "accuracy": accuracy}

    params = model.init(jax.random.PRNGKey(0), batch["image"])
    return step, (params, params, transform.init(params)), batch
