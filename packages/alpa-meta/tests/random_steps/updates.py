"""How random steps make a new state of the gradient, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Loss = Callable[[Any], tuple[Any, Any]]
"""From parameters to (loss, what it says beside)."""

# eps is large so that Adam does not turn the rounding of a gradient that is 0 into a step
_ADAM = optax.adam(1e-2, eps=1e-4)


def _two_groups() -> optax.GradientTransformation:
    def labels(params: Any) -> Any:
        return {name: "slow" if name in ("head", "scale") else "quick" for name in params}

    return optax.partition({"quick": _ADAM, "slow": optax.sgd(1e-2, momentum=0.9)}, labels)


OPTIMISERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.05),
    "adam": _ADAM,
    "momentum": optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10), eps=1e-4),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), _ADAM),
    "clipped_blocks": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.05)),
    "trust_ratio": optax.lars(0.05),
    "averaged": optax.chain(optax.ema(0.9), optax.sgd(0.05)),
    "centralised": optax.chain(optax.centralize(), optax.rmsprop(1e-2, eps=1e-3)),
    "two_groups": _two_groups(),
    "every_second": optax.MultiSteps(optax.sgd(0.05), 2).gradient_transformation(),
    "guarded": optax.apply_if_finite(_ADAM, 3),
}


def _gradient(loss: Loss, state: Any) -> tuple[Any, Any, Any]:
    (value, beside), gradient = jax.value_and_grad(loss, has_aux=True)(state["params"])
    return value, beside, gradient


def _scaled(loss: Loss, state: Any) -> tuple[Any, Any, Any]:
    """A loss scale of the state, as mixed precision has."""
    scale = state["loss_scale"]

    def larger(params: Any) -> tuple[Any, Any]:
        value, beside = loss(params)
        return value * scale, beside

    (value, beside), gradient = jax.value_and_grad(larger, has_aux=True)(state["params"])
    return value / scale, beside, jax.tree.map(lambda g: g / scale, gradient)


def _sharpness_aware(loss: Loss, state: Any) -> tuple[Any, Any, Any]:
    first = jax.grad(loss, has_aux=True)(state["params"])[0]
    length = optax.tree.norm(first) + 1e-3
    moved = jax.tree.map(lambda p, g: p + 0.05 * g / length, state["params"], first)
    (value, beside), gradient = jax.value_and_grad(loss, has_aux=True)(moved)
    return value, beside, gradient


def _pulled_back(loss: Loss, state: Any) -> tuple[Any, Any, Any]:
    value, pull, beside = jax.vjp(loss, state["params"], has_aux=True)
    return value, beside, pull(jnp.ones_like(value))[0]


GRADIENTS = {
    "plain": _gradient,
    "scaled": _scaled,
    "sharpness_aware": _sharpness_aware,
    "pulled_back": _pulled_back,
}


def _norms(value: Any, gradient: Any, updates: Any, state: Any) -> Any:
    by_part = jax.tree.map(jnp.linalg.norm, gradient)
    return {"norm": optax.tree.norm(gradient), "parts": by_part}


def _finite(value: Any, gradient: Any, updates: Any, state: Any) -> Any:
    finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(gradient)]
    return {"finite": jnp.stack(finite).all(), "largest": optax.tree.norm(updates, ord=jnp.inf)}


def _products(value: Any, gradient: Any, updates: Any, state: Any) -> Any:
    return {
        "agreement": optax.tree.vdot(gradient, updates),
        "size": optax.tree.norm(state["params"]),
        "perplexity": jnp.exp(value),
    }


REPORTS: dict[str, Callable[..., Any]] = {
    "nothing": lambda *_: {},
    "norms": _norms,
    "finite": _finite,
    "products": _products,
}
