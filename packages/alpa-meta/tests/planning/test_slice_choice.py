import jax
import jax.numpy as jnp
import perceptron
import pytest

from alpa_meta.options import Options
from alpa_meta.planning.planner import make_plan
from alpa_meta.planning.slice_choice import _pipelines
from alpa_meta.step.program import Step
from cost_model import cluster

CLUSTER = cluster("p3.16xlarge:8")
WEIGHTS = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8
STEP = Step(perceptron.step, (WEIGHTS, jax.ShapeDtypeStruct((64, 256), jnp.float32)))


@pytest.mark.parametrize(("microbatches", "lengths"), [(1, [2, 4, 8]), (2, [4, 8]), (4, [8])])
def test_slices_are_tried_in_more_stages_too_where_microbatches_are_fewer(microbatches, lengths):
    """As in TeraPipe's GPT-3 of 13 billion on 320 V100, which has 15 stages for 32 sequences, and
    in slices 40: 1.24 s a step, not 1.60."""
    told = {"num_microbatches": microbatches, "num_layers": 8, "cache": False}
    planned = make_plan(STEP, CLUSTER, Options(num_stages=2, **told))
    found = _pipelines(planned, STEP, CLUSTER, Options(**told))
    assert [len(one.seconds) for one in found] == lengths
    stages = [one.candidate for one in planned.plan.stage_plan.stages]
    work = sum(one.seconds * one.submesh.num_devices for one in stages)
    for one in found[lengths.count(2) :]:  # equal stages do the same work on all devices
        devices = CLUSTER.num_devices / len(one.seconds)
        assert sum(one.seconds) * devices == pytest.approx(work)
    asked = _pipelines(planned, STEP, CLUSTER, Options(num_stages=2, **told))
    assert [len(one.seconds) for one in asked] == ([2] if microbatches == 1 else [])
