"""Training steps in the idiom of flax nnx' functional examples: `nnx.split`, `nnx.merge`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from library_programs.batches import VOCABULARY, WIDTH, images, padded_tokens


class Block(nnx.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2,
            in_features=WIDTH,
            dropout_rate=0.2,
            deterministic=False,
            decode=False,
            rngs=rngs,
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.down(jax.nn.silu(self.up(self.norm2(x)))))


class MiniGpt(nnx.Module):
    """A causal transformer over padded sentences."""

    def __init__(self, length, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(length, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        mask = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1])))
        for block in self.blocks:
            x = block(x, mask)
        return self.out(x)


def language_model_with_dropout():
    """The counters of the random streams are part of the state; means over unpadded tokens."""
    batch = padded_tokens()
    model = MiniGpt(batch["inputs"].shape[1], nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)

        def loss_fn(model):
            logits = model(batch["inputs"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return jnp.mean(loss, where=batch["targets"] > 0), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        right = jnp.argmax(logits, -1) == batch["targets"]
        metrics = {"loss": loss, "accuracy": jnp.mean(right, where=batch["targets"] > 0)}
        return nnx.state((model, optimizer)), metrics

    return step, state, batch


class Generator(nnx.Module):
    """Images from noise."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.second = nnx.Linear(16, 64, rngs=rngs)

    def __call__(self, z):
        return nnx.sigmoid(self.second(nnx.relu(self.first(z)))).reshape(-1, 8, 8, 1)


class Discriminator(nnx.Module):
    """One logit per image."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        x = nnx.leaky_relu(self.norm(self.conv(x)))
        return self.out(x.reshape(x.shape[0], -1))[:, 0]


def adversarial_images():
    """Two optimisers: the discriminator's gradient, then the generator's, of one key."""
    batch = images()
    generator, discriminator = Generator(nnx.Rngs(0)), Discriminator(nnx.Rngs(1))
    graph_g, params_g = nnx.split(generator)
    graph_d, params_d = nnx.split(discriminator)
    transform = optax.adam(1e-2, b1=0.5, eps=1e-3)
    state = {
        "g": params_g,
        "d": params_d,
        "opt_g": transform.init(params_g),
        "opt_d": transform.init(params_d),
        "key": jax.random.key(5),
    }

    def step(state, batch):
        key, noise_key = jax.random.split(state["key"])
        real = batch["image"]
        noise = jax.random.normal(noise_key, (real.shape[0], 4))
        fake = nnx.merge(graph_g, state["g"])(noise)

        def loss_d(params):
            model = nnx.merge(graph_d, params)
            on_real = optax.sigmoid_binary_cross_entropy(model(real), jnp.ones(real.shape[0]))
            on_fake = optax.sigmoid_binary_cross_entropy(model(fake), jnp.zeros(real.shape[0]))
            return jnp.mean(on_real + on_fake)

        def loss_g(params):
            logits = nnx.merge(graph_d, state["d"])(nnx.merge(graph_g, params)(noise))
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, jnp.ones_like(logits)))

        value_d, grads_d = jax.value_and_grad(loss_d)(state["d"])
        value_g, grads_g = jax.value_and_grad(loss_g)(state["g"])
        updates_d, opt_d = transform.update(grads_d, state["opt_d"])
        updates_g, opt_g = transform.update(grads_g, state["opt_g"])
        new = {
            "g": optax.apply_updates(state["g"], updates_g),
            "d": optax.apply_updates(state["d"], updates_d),
            "opt_g": opt_g,
            "opt_d": opt_d,
            "key": key,
        }
        return new, {"d": value_d, "g": value_g}

    return step, state, batch


class Classifier(nnx.Module):
    """Convolutions, dropout and a dense layer."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.out = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.out(self.dropout(x.reshape(x.shape[0], -1)))


def images_with_metrics():
    """A metric object, updated by every step, is part of the state."""
    batch = images()
    model = Classifier(nnx.Rngs(0, dropout=2))
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graph, state = nnx.split((model, optimizer, metrics))

    def step(state, batch):
        model, optimizer, metrics = nnx.merge(graph, state)

        def loss_fn(model):
            logits = model(batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)
        return nnx.state((model, optimizer, metrics)), metrics.compute()

    return step, state, batch
