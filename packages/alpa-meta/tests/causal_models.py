"""Losses of causal models as people write them, small: attention in many forms, recurrences."""

import jax
import jax.numpy as jnp
from attrs import frozen
from jax import lax

BATCH, TOKENS, WIDTH, HEADS, VOCAB = 2, 12, 8, 2, 11


@frozen
class Model:
    """One causal model and its loss. `mask` is how attention is masked, or a recurrence."""

    mask: str = "where -inf"
    positions: str = "learned"
    loss: str = "along axis"
    num_layers: int = 1
    scan: bool = False
    remat: bool = False
    dropout: bool = False
    merged: bool = False
    longer: bool = False  # inputs and targets are one array


_OVER_TOKENS = {"gate", "square"}  # of masks with a matrix of weights over the tokens


def parameters(model):
    """Return float64 parameters of the model."""
    keys = iter(jax.random.split(jax.random.key(0), 99))

    def made(*shape):
        return 0.3 * jax.random.normal(next(keys), shape, jnp.float64)

    layers = [
        {name: made(WIDTH, WIDTH) for name in "qkvo"}
        | {"a": made(WIDTH, 16), "b": made(16, WIDTH)}
        | ({"gate": made(TOKENS, TOKENS)} if _OVER_TOKENS & {*model.mask.split()} else {})
        for _ in range(model.num_layers)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {
        "embed": made(VOCAB, WIDTH),
        "positions": made(TOKENS + 3, WIDTH),
        "layers": stacked if model.scan else layers,
    }


def batch(model, seed=1):
    """Return tokens and targets."""
    tokens = jax.random.randint(jax.random.key(seed), (BATCH, TOKENS + 1), 0, VOCAB)
    return tokens if model.longer else (tokens[:, :-1], tokens[:, 1:])


def loss(model):
    """Return the loss of (parameters, batch)."""

    def block(params, x, tokens):
        x = x + _mixed(model, params, x, tokens)
        normed = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        if model.merged:
            flat = normed.reshape(BATCH * TOKENS, WIDTH)
            return x + (jax.nn.gelu(flat @ params["a"]) @ params["b"]).reshape(x.shape)
        return x + jax.nn.gelu(normed @ params["a"]) @ params["b"]

    block = jax.checkpoint(block) if model.remat else block

    def of(params, given):
        tokens, targets = (given[:, :-1], given[:, 1:]) if model.longer else given
        x = params["embed"][tokens]
        if model.positions == "learned":
            x = x + params["positions"][:TOKENS]
        if model.dropout:
            kept = jax.random.bernoulli(jax.random.key(7), 0.8, x.shape)
            x = jnp.where(kept, x / 0.8, 0.0)
        if model.scan:
            x, _ = lax.scan(lambda c, p: (block(p, c, tokens), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = block(layer, x, tokens)
        return _mean_loss(model, x @ params["embed"].T, targets)

    return of


def _mean_loss(model, logits, targets):
    log = jax.nn.log_softmax(logits)
    if model.loss == "one-hot":
        each = -(jax.nn.one_hot(targets, VOCAB) * log).sum(-1)
    elif model.loss == "flat":
        flat = log.reshape(BATCH * TOKENS, VOCAB)
        each = -jnp.take_along_axis(flat, targets.reshape(-1, 1), -1).reshape(BATCH, TOKENS)
    elif model.loss == "last":
        return -log[:, -1, 3].mean() + 0.01 * lax.stop_gradient(jnp.abs(logits).max())
    elif model.loss == "by place":
        rows = jnp.arange(BATCH)[:, None]
        each = -log[rows, jnp.arange(TOKENS), targets]
    else:
        each = -jnp.take_along_axis(log, targets[..., None], -1)[..., 0]
    counted = (targets != 3).astype(float)
    return (each * counted).sum() / counted.sum()


def _turned(x):
    half = x.shape[-1] // 2
    angles = jnp.arange(TOKENS)[:, None] / (50.0 ** (jnp.arange(half) / half))
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


def _mixed(model, params, x, tokens):
    if model.mask == "cumsum":
        return (jnp.cumsum(x @ params["q"], 1) / TOKENS * jnp.tanh(x @ params["k"])) @ params["o"]
    if model.mask == "recurrence":
        decay = jax.nn.sigmoid(params["v"][0])

        def advance(state, inputs):
            state = decay * state + jnp.tanh(inputs + state @ params["k"])
            return state, state

        by_time = jnp.moveaxis(x @ params["q"], 1, 0)
        start = jnp.broadcast_to(params["b"][0], (BATCH, WIDTH))
        _, states = lax.scan(advance, start, by_time)
        return jnp.moveaxis(states, 0, 1) @ params["o"]
    if model.mask == "associative scan":
        decay = jax.nn.sigmoid(x @ params["k"])
        _, states = lax.associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x @ params["q"]), axis=1
        )
        return states @ params["o"]
    if model.mask == "token shift":
        before = jnp.concatenate([jnp.zeros_like(x[:, :2]), x[:, :-2]], 1)
        return jnp.tanh(before @ params["q"] + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1])
    if model.mask == "first set":
        return jnp.tanh(jnp.roll(x, 1, 1).at[:, 0].set(params["v"][0])) @ params["q"]
    if model.mask == "chunks":
        return _by_chunks(params, x) @ params["o"]
    if model.mask == "shift back":
        return jnp.tanh(jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0))) @ params["q"])
    if model.mask == "padded convolution":  # with holes
        inner = jnp.pad(jax.nn.silu(x @ params["q"]), ((0, 0), (4, 0), (0, 0)))
        numbers = ("NHC", "HIO", "NHC")
        kernel = params["k"][:3, :, None] * params["v"][0]
        return lax.conv_general_dilated(
            inner, kernel, (1,), [(0, 0)], rhs_dilation=(2,), dimension_numbers=numbers
        )
    if model.mask in ("convolution", "convolution ahead"):
        inner = jax.nn.silu(x @ params["q"])
        mixed = lax.conv_general_dilated(
            inner,
            params["k"][:4, None],
            (1,),
            [(3, 0) if model.mask == "convolution" else (2, 1)],
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=WIDTH,
        )
        return mixed @ params["o"]
    if model.mask in ("gate", "gate ahead", "gate turned", "gate softmax", "kernel"):
        return _gate(model, params) @ x @ params["q"]
    if model.mask == "normalised over tokens":
        return (x - x.mean(1, keepdims=True)) @ params["q"]
    queries, keys, values = (
        (x @ params[name]).reshape(BATCH, TOKENS, HEADS, WIDTH // HEADS) for name in "qkv"
    )
    if model.mask == "grouped":
        keys, values = (jnp.repeat(y[:, :, :1], HEADS, 2) for y in (keys, values))
    if model.positions == "rotary":
        queries, keys = _turned(queries), _turned(keys)
    scores = jnp.einsum("bthd,bshd->bhts", queries, keys) / 2
    if model.mask == "keys first":
        scores = jnp.einsum("bshd,bthd->bhst", keys, queries).swapaxes(-1, -2) / 2
    weights = _weights(model, params, scores, tokens)
    return jnp.einsum("bhts,bshd->bthd", weights, values).reshape(x.shape) @ params["o"]


def _gate(model, params):
    """Return the matrix that mixes the tokens, [tokens, tokens]."""
    here, there = jnp.arange(TOKENS)[:, None], jnp.arange(TOKENS)[None]
    if model.mask == "kernel":
        return jnp.where(here >= there, params["b"][jnp.clip(here - there, 0, 15), 0], 0.0)
    if model.mask == "gate softmax":  # the first token sees all others evenly
        return jax.nn.softmax(jnp.where(here > there, params["gate"], -1e30))
    if model.mask == "gate turned":
        return jnp.tril(params["gate"]).T
    return jnp.tril(params["gate"], 1 if model.mask == "gate ahead" else 0)


def _by_chunks(params, x, chunk=3):
    """Return linear attention by chunks: inside each at once, from one to the next by a scan."""
    queries, keys, values = (
        (x @ params[name]).reshape(BATCH, TOKENS // chunk, chunk, WIDTH) for name in "qkv"
    )
    scores = jnp.tril(jnp.einsum("bntd,bnsd->bnts", queries, keys))

    def advance(state, one):
        keys, values = one
        return state + jnp.einsum("btd,bte->bde", keys, values), state

    by_chunk = jnp.moveaxis(keys, 1, 0), jnp.moveaxis(values, 1, 0)
    _, states = lax.scan(advance, jnp.zeros((BATCH, WIDTH, WIDTH)), by_chunk)
    before = jnp.einsum("bntd,nbde->bnte", queries, states)
    return (before + jnp.einsum("bnts,bnsd->bntd", scores, values)).reshape(x.shape)


def _documents(tokens):
    """Return the number of each token's document, of those that end with a token 3."""
    ends = (tokens == 3).astype(int)
    return jnp.cumsum(ends, 1) - ends


def _weights(model, params, scores, tokens):
    here, there = jnp.arange(TOKENS)[:, None], jnp.arange(TOKENS)[None]
    causal = here >= there
    if model.mask == "by hand":
        scores = jnp.where(causal, scores, -jnp.inf)
        raised = jnp.exp(scores - scores.max(-1, keepdims=True))
        return raised / raised.sum(-1, keepdims=True)
    if model.mask == "additive with alibi":
        scores = scores + jnp.where(causal, 0.0, -1e30) + (there - here) * 0.01
    elif model.mask == "window":
        scores = jnp.where(causal & (here - there < 5), scores, -jnp.inf)
    elif model.mask == "tril -1e30":
        scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -1e30)
    elif model.mask in ("segments", "segments -1e30"):
        alike = tokens[:, None, :, None] // 4 == tokens[:, None, None, :] // 4
        scores = jnp.where(causal & alike, scores, -1e30 if "-1e30" in model.mask else -jnp.inf)
    elif model.mask in ("documents -1e30", "documents of others"):
        ends = _documents(tokens if model.mask == "documents -1e30" else tokens + 1)
        alike = _documents(tokens)[:, None, :, None] == ends[:, None, None]
        scores = jnp.where(causal & alike, scores, -1e30)
    elif model.mask in ("learned bias", "learned bias of earlier tokens"):
        bias = params["b"][jnp.clip(here - there, 0, 15)][..., 0]
        masked = jnp.where(causal if model.mask == "learned bias" else here > there, 0.0, -1e9)
        scores = scores + (bias + masked)
    elif model.mask == "square bias":
        scores = jnp.where(causal, scores + params["gate"], -jnp.inf)
    elif model.mask in ("scaled -1e9", "scaled away"):
        scores = jnp.where(causal, scores, -1e9) * (1e-9 if model.mask == "scaled away" else 0.1)
    elif model.mask == "logarithm":
        scores = scores - jnp.log1p(jnp.where(causal, 0.0, 1e30))
    elif model.mask == "bytes":  # a difference of unsigned bytes is never negative
        rows, keys = here.astype(jnp.uint8), there.astype(jnp.uint8)
        scores = jnp.where(rows - keys >= 0, scores, -jnp.inf)
    elif model.mask == "padding, then causal -1e30":
        scores = jnp.where((tokens != 3)[:, None, None, :], scores, -1e30)
        scores = jnp.where(causal, scores, -1e30)
    elif model.mask == "causal -1e30, then padding":
        scores = jnp.where(causal, scores, -1e30)
        scores = jnp.where((tokens != 3)[:, None, None, :], scores, -jnp.inf)
    elif model.mask == "padding times 1e30":
        scores = scores - 1e30 * (1.0 - (tokens != 3).astype(float))[:, None, None, :]
        scores = jnp.where(causal, scores, -1e30)
    elif model.mask == "padding -1e30":
        scores = jnp.where(causal & (tokens != 3)[:, None, None, :], scores, -1e30)
    elif model.mask == "bidirectional":
        pass
    elif model.mask == "anti-causal":
        scores = jnp.where(here <= there, scores, -jnp.inf)
    else:
        scores = jnp.where(causal, scores, -jnp.inf)
    return jax.nn.softmax(scores)
