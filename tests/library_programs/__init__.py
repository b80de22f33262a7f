"""Training programs in the idiom of public libraries' examples.

Each module holds programs of one library (or of some that go together): functions without
arguments that return (step, state, batch), where step(state, batch) returns (new state, metrics).
Some need libraries beside the locked ones: the dependency group `programs`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

PROGRAMS = (
    "flax_linen:language_model_with_padding",
    "flax_linen:language_model_with_dropout",
    "flax_linen:convnet_with_batch_norm",
    "flax_linen:sequence_to_sequence",
    "flax_linen:variational_autoencoder",
    "flax_linen:mixture_of_experts",
    "flax_linen:scanned_language_model",
    "flax_nnx:language_model_with_dropout",
    "flax_nnx:adversarial_images",
    "flax_nnx:images_with_metrics",
    "equinox_modules:vision_transformer",
    "equinox_modules:recurrent_network",
    "equinox_modules:physics_informed",
    "equinox_modules:score_based_diffusion",
    "equinox_modules:denoising_diffusion",
    "haiku_modules:transformer",
    "haiku_modules:recurrent_language_model",
    "haiku_modules:vector_quantised_autoencoder",
    "haiku_modules:mnist_with_running_average",
    "optax_transforms:differential_privacy",
    "optax_transforms:differential_privacy_by_hand",
    "optax_transforms:accumulated_and_finite",
    "optax_transforms:adversarial_training",
    "optax_transforms:meta_learning",
    "optax_transforms:hessian_diagonal",
    "optax_transforms:ranking",
    "optax_transforms:connectionist_temporal_classification",
    "optax_transforms:contrastive_pairs",
    "optax_transforms:sharpness_aware",
    "optax_transforms:soft_actor_critic",
    "accumulated_gradients:first_round_in_front",
    "accumulated_gradients:first_round_told_by_a_condition",
    "accumulated_gradients:rounds_of_examples_that_lie_apart",
    "accumulated_gradients:optax_microbatches",
    "accumulated_gradients:optax_running_means",
    "accumulated_gradients:optax_gradients_of_each",
    "accumulated_gradients:nnx_rounds_written_out",
    "distrax_distributions:variational_autoencoder",
    "distrax_distributions:normalising_flow",
    "diffrax_equations:neural_differential_equation",
    "diffrax_equations:backsolved_equation",
    "graph_networks:padded_graphs",
    "graph_networks:graphs_of_one_size",
    "equivariant:equivariant_shapes",
    "bayesian:variational_inference",
    "bayesian:amortised_inference",
    "implicit_layers:langevin_dynamics",
    "rlax_agents:deep_q_network",
    "rlax_agents:proximal_policy",
    "rlax_agents:importance_weighted_actor_learner",
    "rlax_agents:reinforce_with_baseline",
    "implicit_layers:regularised_classifier",
    "implicit_layers:deep_equilibrium",
    "implicit_layers:linear_solve_layer",
    "implicit_layers:named_axes",
)


def build(name: str) -> tuple[Callable[..., Any], Any, Any]:
    """Return (step, state, batch) of the program `module:function`."""
    module, function = name.split(":")
    made = getattr(importlib.import_module(f"library_programs.{module}"), function)()
    return made  # type: ignore[no-any-return]
