"""How random steps go through their batch: at once, or in a loop of gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Gradient = Callable[[Any, Any], tuple[Any, Any, Any]]
"""From a part of the batch and a key to (loss, (results, new state), gradient)."""


def _one(gradient_on: Gradient, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    return gradient_on(batch, key)


def _parts(batch: Any, count: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)


def _zeros(gradient_on: Gradient, batch: Any, key: Any, count: int) -> Any:
    part = jax.tree.map(lambda x: x[: len(x) // count], batch)
    value, _, gradient = jax.eval_shape(gradient_on, part, key)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (value, gradient))


def _key_for_each(gradient_on: Gradient, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """Two rounds, whose keys and parts are scanned; results are those of each round."""

    def one(total: Any, scanned: Any) -> tuple[Any, Any]:
        value, (results, _), gradient = gradient_on(*scanned)
        return jax.tree.map(lambda a, b: a + b / 2, total, (value, gradient)), results

    first = _zeros(gradient_on, batch, key, 2)
    keys = jax.random.split(key, 2)
    (value, gradient), results = jax.lax.scan(one, first, (_parts(batch, 2), keys))
    return value, (results, {}), gradient


def _key_carried(gradient_on: Gradient, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """Four rounds, each of which splits the key that it is left."""

    def one(carry: Any, part: Any) -> tuple[Any, Any]:
        total, key = carry
        key, now = jax.random.split(key)
        value, (results, _), gradient = gradient_on(part, now)
        return (jax.tree.map(jnp.add, total, (value, gradient)), key), results

    first = _zeros(gradient_on, batch, key, 4), key
    ((value, gradient), _), results = jax.lax.scan(one, first, _parts(batch, 4))
    return value / 4, (results, {}), jax.tree.map(lambda g: g / 4, gradient)


def _counted(gradient_on: Gradient, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """Four rounds that cut their parts out of the batch and say nothing of their own."""

    def one(k: Any, total: Any) -> Any:
        part = jax.tree.map(lambda x: x[k], _parts(batch, 4))
        value, _, gradient = gradient_on(part, jax.random.fold_in(key, k))
        return jax.tree.map(jnp.add, total, (value, gradient))

    value, gradient = jax.lax.fori_loop(0, 4, one, _zeros(gradient_on, batch, key, 4))
    return value / 4, ({}, {}), jax.tree.map(lambda g: g / 4, gradient)


ROUNDS = {
    "one": _one,
    "key_for_each": _key_for_each,
    "key_carried": _key_carried,
    "counted": _counted,
}
