"""Training steps in the idiom of flax linen: `TrainState`, `rngs=`, mutable collections."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training import train_state
from flax.training.common_utils import onehot

from library_programs.batches import EXAMPLES, VOCABULARY, WIDTH, images, padded_tokens


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    rate: float

    @nn.compact
    def __call__(self, x, mask, deterministic):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=2, dropout_rate=self.rate)(
            y, y, mask=mask, deterministic=deterministic
        )
        x = x + nn.Dropout(self.rate)(y, deterministic=deterministic)
        y = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        y = nn.Dense(WIDTH)(nn.gelu(y))
        return x + nn.Dropout(self.rate)(y, deterministic=deterministic)


class LanguageModel(nn.Module):
    """A causal transformer over padded sentences; the embedding is the output projection."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, tokens, train=True):
        embed = nn.Embed(VOCABULARY, WIDTH)
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], WIDTH))
        x = nn.Dropout(self.rate)(embed(tokens) + positions, deterministic=not train)
        mask = nn.combine_masks(
            nn.make_causal_mask(tokens), nn.make_attention_mask(tokens > 0, tokens > 0)
        )
        for _ in range(2):
            x = Block(self.rate)(x, mask, not train)
        return embed.attend(nn.LayerNorm()(x))


def weighted_cross_entropy(logits, targets, weights, label_smoothing=0.0):
    """Return (sum of losses less their least possible value, sum of weights)."""
    confidence = 1.0 - label_smoothing
    low = label_smoothing / (VOCABULARY - 1)
    least = -(confidence * jnp.log(confidence) + (VOCABULARY - 1) * low * jnp.log(low + 1e-20))
    soft = onehot(targets, VOCABULARY, on_value=confidence, off_value=low)
    loss = -jnp.sum(soft * nn.log_softmax(logits), axis=-1) - least
    return (loss * weights).sum(), weights.sum()


def language_model_with_padding():
    """Label smoothing, weights of padding, and metrics by sum and count."""
    model, batch = LanguageModel(), padded_tokens()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), batch["inputs"], train=False)["params"],
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, eps=1e-3)),
    )

    def step(state, batch):
        weights = jnp.where(batch["targets"] > 0, 1, 0).astype(jnp.float32)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"])
            loss, total = weighted_cross_entropy(logits, batch["targets"], weights, 0.1)
            return loss / total, logits

        (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        loss, total = weighted_cross_entropy(logits, batch["targets"], weights)
        hits = (jnp.argmax(logits, -1) == batch["targets"]) * weights
        metrics = {
            "loss": loss,
            "accuracy": hits.sum(),
            "denominator": total,
            "learning_rate": schedule(state.step),
        }
        return state.apply_gradients(grads=grads), metrics

    return step, state, batch


def language_model_with_dropout():
    """Dropout keyed by the step number; z-loss; loss over the tokens that are none padding."""
    model, batch = LanguageModel(rate=0.3), padded_tokens()
    params = model.init(jax.random.key(0), batch["inputs"], train=False)["params"]
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(1e-2, eps=1e-3)
    )
    dropout_key = jax.random.key(7)

    def step(state, batch):
        key = jax.random.fold_in(dropout_key, state.step)
        mask = (batch["targets"] != 0).astype(jnp.float32)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"], rngs={"dropout": key})
            log_z = jax.nn.logsumexp(logits, axis=-1)
            chosen = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
            loss = log_z - chosen + 1e-3 * jnp.square(log_z)
            return (loss * mask).sum() / jnp.maximum(mask.sum(), 1.0)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "norm": optax.global_norm(grads)}

    return step, state, batch


class ConvNet(nn.Module):
    """Two convolutions with batch normalisation."""

    @nn.compact
    def __call__(self, x, train):
        for features in (4, 8):
            x = nn.Conv(features, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(4)(x.mean(axis=(1, 2)))


class BatchNormState(train_state.TrainState):
    """A training state with running statistics."""

    batch_stats: Any = struct.field(default_factory=dict)


def convnet_with_batch_norm():
    """Batch normalisation: the forward pass reads statistics of all examples."""
    model, batch = ConvNet(), images()
    variables = model.init(jax.random.key(0), batch["image"], train=False)
    state = BatchNormState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.1, momentum=0.9, nesterov=True),
    )

    def step(state, batch):
        def loss_fn(params):
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            return loss + 0.5e-4 * decay, (updates, logits)

        (loss, (updates, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
        return state, {"loss": loss, "accuracy": accuracy}

    return step, state, batch


class SeqToSeq(nn.Module):
    """An LSTM encoder and an LSTM decoder that is given the true previous token."""

    @nn.compact
    def __call__(self, source, target, lengths):
        embed = nn.Embed(VOCABULARY, WIDTH)
        carry, _ = nn.RNN(nn.LSTMCell(WIDTH), return_carry=True)(embed(source), seq_lengths=lengths)
        decoded = nn.RNN(nn.LSTMCell(WIDTH), name="decoder")(embed(target), initial_carry=carry)
        return nn.Dense(VOCABULARY)(decoded)


def sequence_to_sequence():
    """Teacher forcing: scans over time with a carry per example, a loss over unpadded steps."""
    model, batch = SeqToSeq(), padded_tokens()
    lengths = jnp.maximum((batch["inputs"] > 0).sum(1), 1)
    params = model.init(jax.random.key(0), batch["inputs"], batch["targets"], lengths)["params"]
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(3e-3, eps=1e-3)
    )

    def step(state, batch):
        lengths = jnp.maximum((batch["inputs"] > 0).sum(1), 1)
        shifted = jnp.pad(batch["targets"][:, :-1], ((0, 0), (1, 0)))
        mask = batch["targets"] > 0

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"], shifted, lengths)
            one_hot = jax.nn.one_hot(batch["targets"], VOCABULARY)
            xe = jnp.sum(nn.log_softmax(logits) * one_hot, axis=-1)
            return -jnp.sum(jnp.where(mask, xe, 0.0)) / jnp.sum(mask), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        right = jnp.logical_or(jnp.argmax(logits, -1) == batch["targets"], ~mask)
        whole = jnp.mean(jnp.all(right, axis=-1).astype(jnp.float32))
        return state.apply_gradients(grads=grads), {"loss": loss, "whole sentences": whole}

    return step, state, batch


class Vae(nn.Module):
    """A variational autoencoder of images."""

    @nn.compact
    def __call__(self, x, key):
        hidden = nn.relu(nn.Dense(16, name="encoder")(x))
        mean, logvar = nn.Dense(3, name="mean")(hidden), nn.Dense(3, name="logvar")(hidden)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, logvar.shape)
        out = nn.Dense(x.shape[-1], name="out")(nn.relu(nn.Dense(16, name="decoder")(z)))
        return out, mean, logvar


def variational_autoencoder():
    """Noise drawn for each example; a key carried from step to step; losses vmapped."""
    model = Vae()
    batch = images()["image"].reshape(EXAMPLES, -1)
    params = model.init(jax.random.key(0), batch, jax.random.key(1))["params"]
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(1e-2, eps=1e-3)
    )

    @jax.vmap
    def kl_divergence(mean, logvar):
        return -0.5 * jnp.sum(1 + logvar - jnp.square(mean) - jnp.exp(logvar))

    @jax.vmap
    def cross_entropy(logits, labels):
        logits = nn.log_sigmoid(logits)
        return -jnp.sum(labels * logits + (1.0 - labels) * jnp.log(-jnp.expm1(logits)))

    def step(carried, batch):
        state, key = carried
        key, z_key = jax.random.split(key)

        def loss_fn(params):
            logits, mean, logvar = state.apply_fn({"params": params}, batch, z_key)
            bce = cross_entropy(logits, batch).mean()
            kld = kl_divergence(mean, logvar).mean()
            return bce + kld, {"bce": bce, "kld": kld}

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return (state.apply_gradients(grads=grads), key), {"loss": loss, **metrics}

    return step, (state, jax.random.key(3)), batch


class MoE(nn.Module):
    """Experts without a capacity, each token sent to its best two."""

    @nn.compact
    def __call__(self, x):
        probabilities = nn.softmax(nn.Dense(4, use_bias=False, name="router")(x))
        gates, chosen = jax.lax.top_k(probabilities, 2)
        gates = gates / gates.sum(-1, keepdims=True)
        assigned = jax.nn.one_hot(chosen, 4)
        up = self.param("up", nn.initializers.lecun_normal(), (4, WIDTH, 2 * WIDTH))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 2 * WIDTH, WIDTH))
        hidden = nn.gelu(jnp.einsum("btd,edf->btef", x, up))
        mixed = jnp.einsum("btef,efd,bte->btd", hidden, down, (gates[..., None] * assigned).sum(-2))
        self.sow("losses", "share", (assigned.sum(-2).mean((0, 1)), probabilities.mean((0, 1))))
        self.sow("losses", "z", jnp.mean(jax.nn.logsumexp(x, axis=-1) ** 2))
        return mixed


class MoELanguageModel(nn.Module):
    """An embedding, a mixture of experts and a projection."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        return nn.Dense(VOCABULARY)(x + MoE()(nn.LayerNorm()(x)))


def mixture_of_experts():
    """A balance loss that is a product of two means over all tokens of the batch."""
    model, batch = MoELanguageModel(), padded_tokens()
    params = model.init(jax.random.key(0), batch["inputs"])["params"]
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adamw(1e-2, eps=1e-3)
    )

    def step(state, batch):
        def loss_fn(params):
            logits, sown = state.apply_fn({"params": params}, batch["inputs"], mutable=["losses"])
            ((shares, means),) = sown["losses"]["MoE_0"]["share"]
            (z_loss,) = sown["losses"]["MoE_0"]["z"]
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            balance = 4 * jnp.sum(shares * means)
            return loss.mean() + 1e-2 * balance + 1e-3 * z_loss, balance

        (loss, balance), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "balance": balance}

    return step, state, batch


class GemmaBlock(nn.Module):
    """RMSNorm, rotary grouped-query attention with capped logits, gated feed-forward."""

    @nn.compact
    def __call__(self, x, mask):
        heads, size = 2, 4
        y = nn.RMSNorm()(x)
        q = nn.DenseGeneral((heads, size), use_bias=False, name="q")(y)
        k, v = (nn.DenseGeneral((1, size), use_bias=False, name=n)(y) for n in "kv")
        q, k = rotated(q), rotated(k)
        logits = jnp.einsum("bthd,bskd->bhts", q * size**-0.5, k)
        logits = jnp.tanh(logits / 50.0) * 50.0
        attended = nn.softmax(jnp.where(mask, logits, -2.3819763e38))
        encoded = jnp.einsum("bhts,bskd->bthd", attended, v)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="o")(encoded)
        y = nn.RMSNorm()(x)
        gate = nn.gelu(nn.Dense(2 * WIDTH, use_bias=False)(y))
        return x + nn.Dense(WIDTH, use_bias=False)(gate * nn.Dense(2 * WIDTH, use_bias=False)(y))


def rotated(x):
    """Return [batch, time, heads, size] with rotary position embeddings."""
    half = x.shape[-1] // 2
    timescale = 10_000.0 ** (jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] / timescale
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Gemma(nn.Module):
    """Scanned, rematerialised blocks."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, WIDTH)
        x = embed(tokens) * jnp.sqrt(WIDTH).astype(jnp.float32)
        mask = nn.make_causal_mask(tokens) * (tokens > 0)[:, None, None, :]

        def body(block, x, _):
            return block(x, mask > 0), None

        block = nn.remat(GemmaBlock, prevent_cse=False)()
        scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        x, _ = scan(block, x, None)
        return jnp.tanh(embed.attend(nn.RMSNorm()(x)) / 30.0) * 30.0


def scanned_language_model():
    """Blocks scanned and recomputed, weights of segments, gradient norm, loss over weights."""
    model, batch = Gemma(), padded_tokens()
    params = model.init(jax.random.key(0), batch["inputs"])["params"]
    transform = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2, 0.9, 0.95, eps=1e-3, weight_decay=0.1)
    )
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=transform)

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"])
            targets = jax.nn.one_hot(batch["targets"], VOCABULARY)
            xent = optax.softmax_cross_entropy(logits, targets)
            weights = batch["targets"] != 0
            total_loss = jnp.sum(xent * weights)
            total_weights = jnp.sum(weights)
            return total_loss / (total_weights + 1e-8), {"weights": total_weights}

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        norm = optax.tree.norm(grads)
        return state.apply_gradients(grads=grads), {"loss": loss, "grad norm": norm, **aux}

    return step, state, batch
