"""One model of the corpus, and the two shapes its training step comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from attrs import field, frozen
from attrs.validators import in_

from alpa_meta.types import PyTree

if TYPE_CHECKING:
    import optax

SIZES = ("tiny", "small", "large")
"""tiny: every dim of interest divisible by 8, compiles in seconds on a laptop; small: trains on one
accelerator; large: a published size, to be planned, not run."""


@frozen(kw_only=True)
class CorpusModel:
    """An ordinary single-device training step with the shapes of what it takes.

    `train_step(state, batch)` returns `(state, metrics)`, and `metrics["loss"]` is a scalar.
    A state with random numbers inside the step carries their key at `state["key"]`.
    """

    name: str
    size: str = field(validator=in_(SIZES))
    train_step: Callable[[PyTree, PyTree], tuple[PyTree, dict[str, jax.Array]]]
    make_state: Callable[[jax.Array], PyTree]
    make_batch: Callable[[jax.Array], PyTree]
    exact: bool = True  # False: its source trains on microbatches that are not the whole batch

    @property
    def state(self) -> PyTree:
        """The state's shapes and dtypes; nothing is allocated."""
        return shapes_from_key(self.make_state)

    @property
    def batch(self) -> PyTree:
        """The batch's shapes and dtypes; nothing is allocated."""
        return shapes_from_key(self.make_batch)

    def arguments(self) -> tuple[PyTree, PyTree]:
        """Return a state and a batch, made anew on one device."""
        state = jax.jit(self.make_state)(jax.random.key(0))
        return state, jax.jit(self.make_batch)(jax.random.key(1))


def shapes_from_key(make: Callable[[jax.Array], PyTree]) -> PyTree:
    """Return the shapes of what `make` makes of a random key, without starting a device for it."""
    return jax.eval_shape(lambda: make(jax.random.key(0)))


def optimiser(name: str) -> optax.GradientTransformation:
    """Return the optimiser that a published model names, with a usual learning rate."""
    import optax

    return {
        "adam": lambda: optax.adam(1e-3),
        "adamw": lambda: optax.adamw(1e-3, b2=0.95, weight_decay=0.1),
        "adafactor": lambda: optax.adafactor(1e-2),
    }[name]()


def deterministic_model(
    *,
    name: str,
    size: str,
    init: Callable[[jax.Array], PyTree],
    loss: Callable[[PyTree, PyTree], jax.Array],
    make_batch: Callable[[jax.Array], PyTree],
    optimizer: optax.GradientTransformation,
) -> CorpusModel:
    """Return the model whose step descends `loss(params, batch)`, a scalar."""

    import optax

    def make_state(key: jax.Array) -> PyTree:
        params = init(key)
        return {"params": params, "opt_state": optimizer.init(params)}

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": value}

    return CorpusModel(
        name=name, size=size, train_step=train_step, make_state=make_state, make_batch=make_batch
    )


def random_model(
    *,
    name: str,
    size: str,
    init: Callable[[jax.Array], PyTree],
    loss: Callable[[PyTree, PyTree, jax.Array], jax.Array],
    make_batch: Callable[[jax.Array], PyTree],
    optimizer: optax.GradientTransformation,
    typed_key: bool,
) -> CorpusModel:
    """Return the model whose step descends `loss(params, batch, key)` with a fresh key per step.

    The key lives in the state, as a typed key or as the older uint32[2] array.
    """

    import optax

    def make_state(key: jax.Array) -> PyTree:
        init_key, step_key = jax.random.split(key)
        params = init(init_key)
        return {
            "params": params,
            "opt_state": optimizer.init(params),
            "key": step_key if typed_key else jax.random.key_data(step_key),
        }

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        next_key, loss_key = jax.random.split(state["key"])
        value, gradients = jax.value_and_grad(loss)(state["params"], batch, loss_key)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": next_key}, {"loss": value}

    return CorpusModel(
        name=name, size=size, train_step=train_step, make_state=make_state, make_batch=make_batch
    )
