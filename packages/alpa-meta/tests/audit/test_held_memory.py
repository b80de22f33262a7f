"""What meshes hold over a pipeline's schedule, beside what its plan says."""

from __future__ import annotations

import jax
import pytest

import alpa_meta as alpa
from alpa_meta.audit.held_memory import held_memory
from alpa_meta.corpus import published

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 host devices")
SIZES = {
    "num_layers": 4,
    "hidden": 64,
    "num_heads": 4,
    "inner": 256,
    "vocab": 512,
    "length": 128,
    "batch": 16,
    "dtype": "float32",
}


def pipeline(num_devices, num_stages, schedule):
    """Return the planned and the held bytes of each mesh of a GPT in four microbatches."""
    model = published("gpt-125m", **SIZES)
    step = alpa.parallelize(
        model.train_step,
        cluster=f"host:{num_devices}",
        num_stages=num_stages,
        num_microbatches=4,
        schedule=schedule,
        recompute="none",
        exact=False,
        cache=False,
    )
    step.lower(model.state, model.batch)
    found = held_memory(step.executable)
    assert len(found) == step.plan.stage_plan.num_meshes
    return step.plan.device_bytes[: len(found)], found


@pytest.mark.sample(num_stages=1)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_delayed_backward_by_weight_holds_of_the_forward_pass_only_what_it_reads(num_stages):
    # By one microbatch more for each stage before: without freeing what its part by input alone
    # reads, as the attention's probabilities, later stages are planned with a third more and worse.
    planned, found = pipeline(num_stages, num_stages, "zero-bubble-h1")
    for expected, one in zip(planned, found, strict=True):
        assert one.peak_bytes * 0.95 < expected < one.peak_bytes * 1.12


def test_parts_of_unreduced_sums_are_held_on_every_device():
    planned, found = pipeline(8, 2, "1f1b")
    for expected, one in zip(planned, found, strict=True):
        assert one.buffer_bytes < expected < one.peak_bytes * 1.12


def test_stages_of_one_mesh_are_held_to_what_they_hold_at_one_time():
    # The most of each stage, at whatever time, is a fifth more.
    planned, found = pipeline(2, 4, "interleaved-1f1b")
    assert len(found) == 2
    for expected, one in zip(planned, found, strict=True):
        assert one.peak_bytes * 0.95 < expected < one.peak_bytes * 1.12
