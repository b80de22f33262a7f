"""What a term of a random loss may look at: the network, what it made of the batch, the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen

EXAMPLES, WIDTH, HIDDEN, WORDS = 8, 8, 16, 12
TOKENS = 4


def layer(params: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def layers(params: Any, x: Any) -> list[Any]:
    """Return what each layer gives, [examples, ..., width]."""
    found = []
    for one in params["layers"]:
        x = layer(one, x)
        found.append(x)
    return found


def output(params: Any, x: Any) -> Any:
    return layers(params, x)[-1] @ params["head"]


@frozen
class Seen:
    """`hidden` and `out` are [examples, (tokens,) width], `each` is the error of each example."""

    params: Any
    batch: Any
    state: Any
    key: Any
    hidden: list[Any]
    out: Any
    each: Any
    results: dict[str, Any]
    """Results of the step that terms add."""
    new: dict[str, Any]
    """Entries of the state that terms replace."""

    @property
    def last(self) -> Any:
        """Hidden features of each example, [examples, width]."""
        features = self.hidden[-1]
        return features if features.ndim == 2 else features.mean(1)


Term = Callable[[Seen], Any]


def look(params: Any, batch: Any, state: Any, key: Any) -> Seen:
    hidden = layers(params, batch["x"])
    out = hidden[-1] @ params["head"]
    errors = jnp.square(out - batch["y"]).mean(-1)
    each = errors if errors.ndim == 1 else errors.mean(1)
    return Seen(params, batch, state, key, hidden, out, each, {}, {})


def make_params(seed: int) -> Any:
    """Return two to four layers, an embedding, a router, a head, scalars."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) * 0.6 / shape[0] ** 0.5)

    return {
        "layers": [
            {
                "up": normal(WIDTH, HIDDEN),
                "bias": 0.1 * normal(HIDDEN),
                "down": normal(HIDDEN, WIDTH),
            }
            for _ in range(int(rng.integers(2, 5)))
        ],
        "head": normal(WIDTH, WIDTH),
        "embed": normal(WORDS, WIDTH),
        "router": normal(WIDTH, 4),
        "scale": jnp.asarray(0.3),
    }


def make_batches(seed: int, count: int) -> list[Any]:
    rng = np.random.default_rng(seed + 1)
    shape = (EXAMPLES, WIDTH) if seed % 3 else (EXAMPLES, TOKENS, WIDTH)

    def one() -> Any:
        mask = rng.random(EXAMPLES) > 0.3
        return {
            "x": jnp.asarray(rng.normal(size=shape)),
            "y": jnp.asarray(rng.normal(size=shape)),
            "mask": jnp.asarray(mask, float),
            "word": jnp.asarray(rng.integers(0, WORDS, EXAMPLES)),
            "place": jnp.asarray(rng.permutation(2 * EXAMPLES)[:EXAMPLES]),
        }

    return [one() for _ in range(count)]


def make_state(seed: int) -> Any:
    """Return the state without the optimiser's part."""
    params = make_params(seed)
    return {
        "params": params,
        "average": jax.tree.map(lambda p: 0.9 * p, params),
        "key": jax.random.key(seed),
        "count": jnp.asarray(0),
        "centre": jnp.zeros(WIDTH),
        "direction": jnp.ones(HIDDEN) / HIDDEN**0.5,
        "usage": jnp.ones(WORDS),
        "queue": jnp.ones((2 * EXAMPLES, WIDTH)),
        "priorities": jnp.ones(2 * EXAMPLES),
        "loss_scale": jnp.asarray(4.0),
    }
