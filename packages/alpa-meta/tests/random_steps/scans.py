"""Random training steps of scans over layers: attention, dropout, recomputation, inner loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

BATCH, TOKENS, WIDTH, HEADS = 8, 4, 8, 2

POLICIES = {
    "everything": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("mixed"),
}

# ------------------------------------------------------------ what a layer does


def _normal(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3)


def _attention(x: Any, layer: Any, now: Any) -> Any:
    batch, tokens, width = x.shape
    q, k, v = jnp.split((_normal(x) @ layer["qkv"]).reshape(batch, tokens, HEADS, -1), 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tri(tokens, dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
    return x + checkpoint_name(mixed, "mixed") @ layer["out"]


def _dense(x: Any, layer: Any, now: Any) -> Any:
    return x + jnp.tanh(_normal(x) @ layer["up"] + layer["bias"]) @ layer["down"]


def _dropout(x: Any, layer: Any, now: Any) -> Any:
    kept = jax.random.bernoulli(now["key"], 0.8, x.shape)
    return x + jnp.where(kept, jnp.tanh(x @ layer["out"]) / 0.8, 0)


def _recurrence(x: Any, layer: Any, now: Any) -> Any:
    def token(h: Any, one: Any) -> Any:
        h = jnp.tanh(0.5 * h + one @ layer["out"])
        return h, h

    _, found = jax.lax.scan(token, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return x + found.swapaxes(0, 1)


def _counted_loop(x: Any, layer: Any, now: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, x: x + 0.1 * jnp.tanh(x @ layer["out"]), x)


def _gate(x: Any, layer: Any, now: Any) -> Any:
    def on(x: Any) -> Any:
        return x + jnp.sin(x @ layer["out"])

    return jax.lax.cond(now["index"] % 2 == 0, on, lambda x: x, x)


def _switch(x: Any, layer: Any, now: Any) -> Any:
    branches = [lambda x: x, lambda x: jnp.sin(x) * layer["bias"][0], lambda x: x @ layer["out"]]
    return x + jax.lax.switch(now["index"] % 3, branches, x)


def _shift(x: Any, layer: Any, now: Any) -> Any:
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return x + 0.5 * before * layer["bias"][:WIDTH]


def _convolution(x: Any, layer: Any, now: Any) -> Any:
    kernel = layer["out"][:3].reshape(3, 1, WIDTH)
    found = jax.lax.conv_general_dilated(
        x, kernel, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=WIDTH,
    )  # fmt: skip
    return x + found


def _experts(x: Any, layer: Any, now: Any) -> Any:
    gates = jax.nn.softmax(x @ layer["out"][:, :2])
    halves = jnp.stack(jnp.split(layer["up"], 2, axis=-1))
    return x + jnp.einsum("bte,btd,edh->bth", gates, x, halves)


def _running_sum(x: Any, layer: Any, now: Any) -> Any:
    return x + 0.2 * jnp.cumsum(x, 1) * layer["bias"][:WIDTH]


def _scaled(x: Any, layer: Any, now: Any) -> Any:
    return x * (1 + 0.1 * now["scale"])


LAYERS = {
    "attention": _attention,
    "dense": _dense,
    "dropout": _dropout,
    "recurrence": _recurrence,
    "counted_loop": _counted_loop,
    "gate": _gate,
    "switch": _switch,
    "shift": _shift,
    "convolution": _convolution,
    "experts": _experts,
    "running_sum": _running_sum,
    "scaled": _scaled,
}

# ------------------------------------------------------------ how the scan goes, what is read of it

SCANS = (
    "reverse", "unroll", "twice", "halves", "pairs", "keys_split", "carried_key",
    "index_carried", "scaled_before", "inner_checkpoint", "first_apart",
)  # fmt: skip

READS = ("sizes", "means", "carried_loss", "all_hidden", "last_token", "decay", "tied", "middle")

PARTS = (
    *(f"layer:{name}" for name in LAYERS),
    *(f"checkpoint:{name}" for name in POLICIES),
    *(f"scan:{name}" for name in SCANS),
    *(f"read:{name}" for name in READS),
)


def choose(seed: int) -> tuple[str, ...]:
    """Return the parts of a random step: what layers do, how they are scanned, what is read."""
    rng = np.random.default_rng(seed)

    def some(names: Any, most: int, least: int = 0) -> list[str]:
        return list(rng.choice(list(names), int(rng.integers(least, most + 1)), replace=False))

    return (
        *(f"layer:{name}" for name in some(LAYERS, 3, 1)),
        *(f"checkpoint:{name}" for name in some(POLICIES, 1)),
        *(f"scan:{name}" for name in some(SCANS, 3)),
        *(f"read:{name}" for name in some(READS, 3)),
        *(["optimiser:adam"] if rng.random() < 0.5 else []),
    )


def num_examples(seed: int) -> int:
    return BATCH


def training(seed: int, parts: tuple[str, ...]) -> tuple[Any, Any, list[Any]]:
    """Return (step, state, batches) made of the parts."""
    has = set(parts).__contains__
    rng = np.random.default_rng(seed + 1)
    num_layers = int(rng.integers(2, 4)) * 2
    kinds = [LAYERS[part.partition(":")[2]] for part in parts if part.startswith("layer:")]
    policies = [part.partition(":")[2] for part in parts if part.startswith("checkpoint:")]

    def body(carry: Any, scanned: Any) -> tuple[Any, Any]:
        x, extra = carry
        layer, now = scanned
        if has("scan:carried_key"):
            key, used = jax.random.split(extra["key"])
            extra, now = extra | {"key": key}, now | {"key": used}
        elif not has("scan:keys_split"):
            now = now | {"key": jax.random.fold_in(extra["key"], now["index"])}
        if has("scan:index_carried"):
            now, extra = now | {"index": extra["index"]}, extra | {"index": extra["index"] + 1}
        for kind in kinds:
            if has("scan:inner_checkpoint"):
                x = jax.checkpoint(kind)(x, layer, now)
            else:
                x = kind(x, layer, now)
        if has("read:carried_loss"):
            extra = extra | {"loss": extra["loss"] + jnp.square(x).mean()}
        seen: dict[str, Any] = {}
        if has("read:sizes"):
            seen["sizes"] = jnp.square(x).mean()
        if has("read:means"):
            seen["means"] = x.mean((1, 2))
        if has("read:all_hidden"):
            seen["hidden"] = x
        return (x, extra), seen

    for name in policies:
        body = jax.checkpoint(body, policy=POLICIES[name])

    def over(carry: Any, scanned: Any, reverse: bool = False) -> tuple[Any, Any]:
        if has("scan:pairs"):
            paired = jax.tree.map(lambda p: p.reshape(-1, 2, *p.shape[1:]), scanned)
            carry, seen = jax.lax.scan(
                lambda carry, pair: jax.lax.scan(body, carry, pair), carry, paired, reverse=reverse
            )
            return carry, jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), seen)
        unroll = 2 if has("scan:unroll") else 1
        return jax.lax.scan(body, carry, scanned, reverse=reverse, unroll=unroll)

    def loss_of(params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        x = params["embed"][batch["word"]]
        index = jnp.arange(num_layers)
        now: dict[str, Any] = {"index": index, "scale": params["scales"]}
        if has("scan:keys_split"):
            now["key"] = jax.random.split(key, num_layers)
        stack = params["layers"]
        if has("scan:scaled_before"):
            stack = jax.tree.map(lambda p: 0.5 * p, stack)
        extra = {"key": key, "loss": jnp.zeros(()), "index": jnp.asarray(0)}
        scanned = (stack, now)
        if has("scan:first_apart"):
            first, scanned = (
                jax.tree.map(lambda p: p[0], scanned), jax.tree.map(lambda p: p[2:], scanned)
            )  # fmt: skip
            x = body((x, extra), first)[0][0]
        results: dict[str, Any] = {}
        value = jnp.zeros(())
        if has("scan:halves"):
            half = 2 if has("scan:first_apart") or has("scan:pairs") else num_layers // 2
            carry, seen = over((x, extra), jax.tree.map(lambda p: p[:half], scanned))
            if has("read:middle"):
                value = value + jnp.square(carry[0]).mean()
                results["middle"] = carry[0].mean((1, 2))
            if num_layers > half and len(jax.tree.leaves(scanned)[0]) > half:
                carry, seen = over(carry, jax.tree.map(lambda p: p[half:], scanned))
        else:
            carry, seen = over((x, extra), scanned, has("scan:reverse"))
        if has("scan:twice"):
            carry, seen = over(carry, scanned)
        x, extra = carry
        head = params["embed"].T if has("read:tied") else params["head"]
        logits = _normal(x) @ head
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
        value = value + (losses[:, -1].mean() if has("read:last_token") else losses.mean())
        if has("read:carried_loss"):
            value = value + 0.1 * extra["loss"]
        if has("read:sizes"):
            value = value + 0.1 * (seen["sizes"] * jnp.arange(len(seen["sizes"]))).sum()
        if has("read:means"):
            results["means"] = seen["means"]
            value = value + jnp.square(seen["means"]).mean(1).sum()
        if has("read:all_hidden"):
            value = value + 0.1 * jnp.abs(seen["hidden"][1]).mean()
        if has("read:decay"):
            value = value + 1e-2 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params["layers"]))
        return value, results

    optimiser = optax.adam(1e-2, eps=1e-4) if has("optimiser:adam") else optax.sgd(0.05)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, now = jax.random.split(state["key"])
        (value, results), gradient = jax.value_and_grad(loss_of, has_aux=True)(
            state["params"], batch, now
        )
        updates, moments = optimiser.update(gradient, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "moments": moments, "key": key}
        return new, results | {"loss": value, "norm": optax.tree.norm(gradient)}

    params = _params(rng, num_layers)
    state = {"params": params, "moments": optimiser.init(params), "key": jax.random.key(seed)}
    words = rng.integers(0, 2 * WIDTH, (2, 2, BATCH, TOKENS))
    return step, state, [{"word": jnp.asarray(a), "next": jnp.asarray(b)} for a, b in words]


def _params(rng: np.random.Generator, num_layers: int) -> Any:
    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) * 0.6 / shape[-2] ** 0.5)

    return {
        "layers": {
            "qkv": normal(num_layers, WIDTH, 3 * WIDTH),
            "out": normal(num_layers, WIDTH, WIDTH),
            "up": normal(num_layers, WIDTH, 2 * WIDTH),
            "bias": 0.1 * normal(num_layers, 2 * WIDTH),
            "down": normal(num_layers, 2 * WIDTH, WIDTH),
        },
        "scales": normal(num_layers, 1)[:, 0],
        "embed": normal(2 * WIDTH, WIDTH),
        "head": normal(WIDTH, 2 * WIDTH),
    }
