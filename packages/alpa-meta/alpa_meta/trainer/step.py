"""The training step a user would write: plain flax, optax and `jax.value_and_grad`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from attrs import field, frozen
from attrs.validators import ge, gt
from flax.training.train_state import TrainState

from alpa_meta.trainer.model import Gpt, GptOptions
from alpa_meta.types import PyTree

Batch = dict[str, PyTree]
Metrics = dict[str, jax.Array]


@frozen(kw_only=True)
class OptimiserOptions:
    """AdamW with linear warm-up, cosine decay to a tenth, and clipping by the global norm."""

    learning_rate: float = field(default=1e-2, validator=gt(0))
    warmup_steps: int = field(default=20, validator=ge(0))
    schedule_steps: int = field(default=400, validator=ge(1))  # the cosine reaches its floor here
    weight_decay: float = field(default=0.05, validator=ge(0))
    clip_norm: float = field(default=1.0, validator=gt(0))


def learning_rates(options: OptimiserOptions) -> optax.Schedule:
    """Return the learning rate as a function of the step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=options.learning_rate,
        warmup_steps=options.warmup_steps,
        decay_steps=max(options.schedule_steps, options.warmup_steps + 1),
        end_value=options.learning_rate / 10,
    )


def make_optimiser(options: OptimiserOptions) -> optax.GradientTransformation:
    """Return clipping by global norm followed by AdamW on the learning-rate schedule."""
    return optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.adamw(learning_rates(options), b2=0.98, weight_decay=options.weight_decay),
    )


def make_state_maker(
    model: GptOptions, optimiser: optax.GradientTransformation
) -> Callable[[jax.Array], TrainState]:
    """Return `make_state(key)`, which builds parameters and optimiser state from a random key."""
    gpt = Gpt(model)

    def make_state(key: jax.Array) -> TrainState:
        tokens = jnp.zeros((1, model.context), jnp.int32)
        params = gpt.init(key, tokens)["params"]
        state: TrainState = TrainState.create(  # type: ignore[no-untyped-call]
            apply_fn=gpt.apply, params=params, tx=optimiser
        )
        return state

    return make_state


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Return the state after one step on `batch`, and its metrics.

    `batch` has "inputs" and "targets", int32 [batch, position]; the loss is the mean over both dims
    of the negative log likelihood in nats.
    """

    def loss_of(params: PyTree) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["inputs"])
        loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"]
        ).mean()
        return loss

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
    return state.apply_gradients(grads=gradients), metrics  # type: ignore[no-untyped-call]
