"""Published models have the published number of parameters, and their programs train."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_meta.corpus import published
from alpa_meta.corpus.bottleneck_resnet import BottleneckResNetShape
from alpa_meta.corpus.bottleneck_resnet import of_shape as bottleneck_resnet
from alpa_meta.corpus.llama import LlamaShape
from alpa_meta.corpus.llama import of_shape as llama
from alpa_meta.corpus.swin import SwinShape
from alpa_meta.corpus.swin import of_shape as swin
from alpa_meta.corpus.transformer import TransformerShape
from alpa_meta.corpus.transformer import of_shape as transformer
from alpa_meta.published_models import PUBLISHED
from cost_model import cluster

QUICK = {"xla_backend_optimization_level": 0}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-39b", 39.5),
        ("moe-2.4b", 2.42),
        ("wide-resnet-1b", 1.006),
        ("llama-8b", 8.03),
        ("mixtral-8x7b", 46.70),
        ("swin-huge-32", 0.70),
        ("gpt3-13b", 13.1),
    ],
)
def test_the_number_of_parameters_is_the_published_one(name, billions):
    params = published(name).state["params"]
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_every_record_names_a_source_and_a_cluster_that_is_known():
    for name, model in PUBLISHED.items():
        assert model.name == name and model.source
        assert cluster(model.cluster).num_devices >= 1


SIZES: dict[str, Any] = {"vocab": 64, "length": 8, "batch": 8, "dtype": "float32"}
TRANSFORMER = {"num_layers": 2, "hidden": 16, "num_heads": 2, "inner": 32, **SIZES}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(transformer("t", TransformerShape(**TRANSFORMER)), marks=pytest.mark.bulk),
        transformer(
            "e", TransformerShape(**TRANSFORMER, num_experts=4, capacity=4, optimiser="adafactor")
        ),
        pytest.param(
            llama("l", LlamaShape(**TRANSFORMER, num_key_value_heads=1, num_experts=4, capacity=8)),
            marks=pytest.mark.bulk,
        ),
        swin(
            "s",
            SwinShape(
                depths=(2, 2), hidden=8, head=4, window=2, image=16, patch=2, num_classes=4, batch=4
            ),
        ),
        bottleneck_resnet(
            "b",
            BottleneckResNetShape(blocks=(1, 1), base=4, width=2, image=16, num_classes=4, batch=4),
        ),
    ],
    ids=lambda model: model.name,
)
def test_two_steps_on_a_fixed_batch_lower_a_finite_loss(model):
    step = jax.jit(model.train_step, compiler_options=QUICK)
    state = jax.jit(model.make_state, compiler_options=QUICK)(jax.random.key(0))
    batch = model.make_batch(jax.random.key(1))
    state, first = step(state, batch)
    _, second = step(state, batch)
    assert np.isfinite(second["loss"]) and second["loss"] < first["loss"]


def test_sizes_can_be_changed_and_unknown_ones_are_refused():
    model = published("gpt-39b", num_layers=2, batch=8, length=16)
    assert len(model.state["params"]["layers"]) == 2
    assert model.batch["tokens"].shape == (8, 16)
    with pytest.raises(ValueError, match="has no 'length', got 7"):
        published("wide-resnet-1b", length=7)
    with pytest.raises(ValueError, match="no published model 'gpt-40b'"):
        published("gpt-40b")


def test_batch_statistics_are_taken_of_microbatches_as_their_source_does():
    assert not published("wide-resnet-250m").exact
    assert published("gpt-125m").exact


@pytest.mark.parametrize(
    ("name", "devices", "sizes"),
    [
        # rows priced at another size than they are built at say 2.5e-4 more than the step takes
        ("moe-380m", "p3.16xlarge:1", {"batch": 32, "num_layers": 4}),
        # HiGHS crashed in its tree, and the process with it
        pytest.param(
            "llama-8b",
            "p3.16xlarge:4",
            {"num_layers": 7, "length": 1024, "batch": 48},
            marks=pytest.mark.bulk,
        ),
    ],
)
def test_models_on_which_planning_had_failed_are_planned(name, devices, sizes):
    model = published(name, **sizes)
    options = alpa.Options(cache=False, exact=model.exact)
    step = alpa.parallelize(model.train_step, cluster=cluster(devices), options=options)
    plan = step.plan_for(model.state, model.batch)
    assert 0 < plan.lower_bound <= plan.step_seconds and plan.gap <= 0.01
