"""Training programs in the idiom of public libraries run cut into microbatches and as stages.

Here a few of them; `benchmarks/public_programs.py` runs them all, in every way.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest
from library_programs import build

import alpa_meta as alpa

CUT: dict[str, Any] = {"cluster": "host:4", "num_stages": 1, "num_microbatches": 2}


@pytest.mark.parametrize(
    "name",
    [
        "haiku_modules:vector_quantised_autoencoder",
        "optax_transforms:differential_privacy",
        pytest.param("optax_transforms:ranking", marks=pytest.mark.bulk),
        "bayesian:amortised_inference",
        pytest.param("flax_nnx:images_with_metrics", marks=pytest.mark.bulk),
        pytest.param("graph_networks:graphs_of_one_size", marks=pytest.mark.bulk),
        pytest.param("flax_linen:mixture_of_experts", marks=pytest.mark.bulk),
        pytest.param("diffrax_equations:backsolved_equation", marks=pytest.mark.bulk),
    ],
)
def test_programs_agree_with_one_device_in_microbatches(agrees, name):
    step, state, batch = build(name)
    agrees(step, state, [batch], tolerance=1e-4, **CUT)


@pytest.mark.parametrize(
    "name",
    [
        "flax_linen:variational_autoencoder",
        # a microbatch has nothing of the last layer: the generator's loss is of the whole batch
        pytest.param("flax_nnx:adversarial_images", marks=pytest.mark.bulk),
        # the actor's loss reads the critic behind its update
        "optax_transforms:soft_actor_critic",
        pytest.param("accumulated_gradients:first_round_in_front", marks=pytest.mark.bulk),
        pytest.param(
            "accumulated_gradients:first_round_told_by_a_condition", marks=pytest.mark.bulk
        ),
        pytest.param(
            "accumulated_gradients:rounds_of_examples_that_lie_apart", marks=pytest.mark.bulk
        ),
        pytest.param("accumulated_gradients:optax_gradients_of_each", marks=pytest.mark.bulk),
        "accumulated_gradients:nnx_rounds_written_out",
        pytest.param("accumulated_gradients:optax_microbatches", marks=pytest.mark.bulk),
        pytest.param("accumulated_gradients:optax_running_means", marks=pytest.mark.bulk),
        pytest.param("optax_transforms:contrastive_pairs", marks=pytest.mark.bulk),
        # all of the loss is behind a gradient: the first layers have nothing
        "optax_transforms:adversarial_training",
    ],
)
def test_programs_agree_as_two_stages(agrees, name):
    step, state, batch = build(name)
    agrees(step, state, [batch], tolerance=1e-4, **{**CUT, "num_stages": 2})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("flax_linen:convnet_with_batch_norm", r"flax_linen\.py.* mixes examples"),
        ("graph_networks:padded_graphs", "differ in their first dim: .*batch_argnums"),
    ],
)
def test_what_is_over_all_examples_is_refused_with_the_line_or_what_to_do(name, reason):
    step, state, batch = build(name)
    shapes = jax.eval_shape(lambda: (state, batch))
    with pytest.raises(alpa.PlanError, match=reason):
        alpa.parallelize(step, **CUT).plan_for(*shapes)


def test_a_plan_says_how_arrays_that_the_step_closes_over_are_sharded():
    step, state, batch = build("diffrax_equations:backsolved_equation")
    shapes = jax.eval_shape(lambda: (state, batch))
    plan = alpa.parallelize(step, **{**CUT, "num_stages": 2}).plan_for(*shapes)
    assert any(name.startswith("constant.") for name in plan.shardings[1].received_specs)
    again = alpa.parallelize(step, plan=plan).plan_for(*shapes)
    assert again.shardings == plan.shardings
