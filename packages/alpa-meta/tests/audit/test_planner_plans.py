"""Corpus programs are their plans under the planner's: collectives, bytes, memory, numerics."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import perceptron
import pytest

import alpa_meta as alpa
from alpa_meta.audit.planner_plans import audit_planned, reference_of
from alpa_meta.corpus import build

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 host devices")
WHOLE: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1}


@pytest.fixture(scope="module")
def convnet():
    return build("convnet")


@pytest.fixture(scope="module")
def reference(convnet):
    return reference_of(convnet)


def test_the_planner_s_plan_is_obeyed_exactly_and_right(convnet, reference):
    found = audit_planned(convnet, "host:8", alpa.Options(**WHOLE), reference=reference)
    assert found.ok and found.equal, found.text()
    (memory,) = found.memory.values()
    assert memory.argument_bytes == memory.predicted_argument_bytes
    assert (
        memory.predicted_peak_bytes is not None
        and memory.predicted_peak_bytes > 0
        and not memory.judge_peak
    )


@pytest.mark.sample(preset=1)
@pytest.mark.parametrize("preset", ["dp", "zero3"])
def test_a_preset_is_a_constraint_whose_plan_is_obeyed(convnet, reference, preset):
    step = alpa.parallelize(convnet.train_step, cluster="h100:8", preset=preset, **WHOLE)
    found = step.audit(*convnet.arguments(), reference=reference)
    assert found.ok and found.equal, found.text()
    assert sum(len(report.lines) for report in found.tasks.values()) > 0
    cut = [any(spec.dims) for spec in step.plan.shardings[0].state_specs.values()]
    assert sum(cut) > (1 if preset == "zero3" else 0)


def test_shapes_are_audited_without_running(convnet):
    step = alpa.parallelize(convnet.train_step, cluster="host:8", **WHOLE)
    found = step.audit(convnet.state, convnet.batch)
    assert found.ok and found.numerics is None


def test_hosts_hold_a_parameter_in_pieces_whole_from_pass_to_pass():
    # four times as many bytes of weights as of activations
    model = perceptron.model(width=256, depth=8, rows=512)
    options = alpa.Options(**WHOLE, preset="zero3", mesh_shape=(8,), recompute="none")
    (memory,) = audit_planned(model, "host:8", options, numerics=False).memory.values()
    assert memory.predicted_peak_bytes is not None
    assert 0.97 < memory.predicted_peak_bytes / memory.peak_bytes < 1.1


@pytest.mark.skipif(find_spec("equinox") is None, reason="equinox is not installed")
def test_every_task_of_a_pipeline_is_audited():
    model = build("equinox-mlp")
    step = alpa.parallelize(
        model.train_step, cluster="host:8", num_stages=2, num_microbatches=2, schedule="1f1b"
    )
    found = step.audit(model.state, model.batch)
    assert found.ok, found.text()
    assert {name.split(".")[0] for name in found.tasks} >= {"forward", "backward", "update"}
    assert set(found.memory) == set(found.tasks)
