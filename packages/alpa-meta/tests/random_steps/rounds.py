"""How random steps go through their batch: at once, or in rounds of gradient accumulation."""

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


def _front(gradient_on: Gradient, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """The first round in front of a loop over the three others."""
    size = len(jax.tree.leaves(batch)[0]) // 4

    def one(k: Any, total: Any) -> Any:
        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, k * size, size), batch)
        value, _, gradient = gradient_on(part, jax.random.fold_in(key, k))
        return jax.tree.map(jnp.add, total, (value, gradient))

    part = jax.tree.map(lambda x: x[:size], batch)
    value, _, gradient = gradient_on(part, jax.random.fold_in(key, 0))
    value, gradient = jax.lax.fori_loop(1, 4, one, (value, gradient))
    return value / 4, ({}, {}), jax.tree.map(lambda g: g / 4, gradient)


def _first_told(gradient_on: Gradient, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """Two rounds of a loop whose first has no value to add to."""

    def one(k: Any, carry: Any) -> Any:
        value, gradient, key = carry
        key, now = jax.random.split(key)
        part = jax.tree.map(lambda x: x[k], _parts(batch, 2))
        own, _, more = gradient_on(part, now)
        value = jax.lax.cond(k == 0, lambda: own, lambda: value + own)
        return value, jax.tree.map(jnp.add, gradient, more), key

    first = *_zeros(gradient_on, batch, key, 2), key
    value, gradient, _ = jax.lax.fori_loop(0, 2, one, first)
    return value / 2, ({}, {}), jax.tree.map(lambda g: g / 2, gradient)


def _written_out(gradient_on: Gradient, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """Four rounds one after the other, each of which splits the key; results are those of each."""
    found = []
    for k in range(4):
        key, now = jax.random.split(key)
        found.append(gradient_on(jax.tree.map(lambda x, k=k: x[k], _parts(batch, 4)), now))
    values, results, gradients = zip(*found, strict=True)
    gradient = jax.tree.map(lambda *every: sum(every) / 4, *gradients)
    each = jax.tree.map(lambda *every: jnp.stack(every), *(own for own, _ in results))
    return jnp.mean(jnp.array(values)), (each, {}), gradient


def _running_mean(gradient_on: Gradient, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """Four rounds of every fourth example, written out, and the mean of those so far."""
    mean = None
    for k in range(4):
        part = jax.tree.map(lambda x, k=k: x[k::4], batch)
        value, _, gradient = gradient_on(part, jax.random.fold_in(key, k))
        own = value, gradient
        if mean is None:
            mean = own
        else:
            mean = jax.tree.map(lambda m, o, k=k: m + (o - m) / (k + 1), mean, own)
    assert mean is not None
    return mean[0], ({}, {}), mean[1]


def _spread(gradient_on: Gradient, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """A loop over two parts whose examples lie apart in the batch, every second."""
    parts = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]).swapaxes(0, 1), batch)

    def one(total: Any, scanned: Any) -> tuple[Any, Any]:
        value, _, gradient = gradient_on(*scanned)
        return jax.tree.map(lambda a, b: a + b / 2, total, (value, gradient)), None

    first = _zeros(gradient_on, batch, key, 2)
    (value, gradient), _ = jax.lax.scan(one, first, (parts, jax.random.split(key, 2)))
    return value, ({}, {}), gradient


ROUNDS = {
    "one": _one,
    "key_for_each": _key_for_each,
    "key_carried": _key_carried,
    "counted": _counted,
    "front": _front,
    "first_told": _first_told,
    "written_out": _written_out,
    "running_mean": _running_mean,
    "spread": _spread,
}
