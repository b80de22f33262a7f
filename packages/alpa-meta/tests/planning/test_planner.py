"""The planner: bounds, memory, saved plans."""

import math
import tomllib

import jax
import jax.numpy as jnp
import pytest
from attrs import evolve

from alpa_interchange import ParallelPlan, from_json, to_json
from alpa_meta.errors import InfeasibleError, PlanError
from alpa_meta.options import Options
from alpa_meta.planning.plan_identity import problem_hash
from alpa_meta.planning.planner import _finished, _on_parts, make_plan, restore
from alpa_meta.planning.range_search import Prospect
from alpa_meta.step.program import Step
from cost_model import calibrated_model, cluster
from cost_model.cluster_file import parse_cluster


def _step(weights, batch):
    def loss(weights):
        return jnp.mean(jnp.tanh(batch @ weights["up"]) @ weights["down"] ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


WEIGHTS = {
    "up": jax.ShapeDtypeStruct((32, 64), jnp.float32),
    "down": jax.ShapeDtypeStruct((64, 32), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((16, 32), jnp.float32)


def _plan(**options):
    return make_plan(Step(_step, (WEIGHTS, BATCH)), cluster("h100:8"), Options(**options))


def test_a_plan_is_never_below_its_bound():
    for settings in ({}, {"num_stages": 2}, {"num_microbatches": 4, "num_stages": 1}):
        plan = _plan(**settings).plan
        assert 0 < plan.lower_bound <= plan.step_seconds
        assert plan.gap >= 0


def test_a_single_stage_is_proved_up_to_its_alternatives():
    plan = _plan(num_stages=1).plan
    assert plan.gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("num", [1, 2, 3, 7, 25])
def test_stages_that_meshes_cannot_share_evenly_are_refused_by_the_interleaved_schedule(num):
    with pytest.raises(PlanError, match=f"num_stages={num} .* one of 2, 3, 4, 6 stages"):
        _plan(num_stages=num, schedule="interleaved-1f1b")


@pytest.mark.parametrize("settings", [{"num_stages": 99}, {"num_stages": 9, "schedule": "gpipe"}])
def test_stages_that_the_devices_cannot_have_are_refused_before_the_step_is_traced(settings):
    def untraced(weights, batch):
        raise AssertionError("traced")

    step = Step(untraced, (WEIGHTS, BATCH))
    with pytest.raises(PlanError, match="not possible on the 8 devices of 'h100:8'"):
        make_plan(step, cluster("h100:8"), Options(**settings))


def test_four_stages_share_two_devices_under_any_schedule_that_lets_them():
    weights = [{"up": WEIGHTS["up"], "down": WEIGHTS["down"]}] * 4

    def step(weights, batch):
        def loss(weights):
            x = batch
            for weight in weights:
                x = x + jnp.tanh(x @ weight["up"]) @ weight["down"]
            return jnp.mean(x**2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    asked = Step(step, (weights, BATCH))
    plan = make_plan(asked, cluster("h100:2"), Options(num_stages=4)).plan
    assert plan.num_stages == 4 and plan.stage_plan.num_meshes == 2
    with pytest.raises(PlanError, match="each stage needs a mesh of its own"):
        make_plan(asked, cluster("h100:2"), Options(num_stages=3))


HOSTS = """
name = "a100 and v100"
inter_group = "infiniband-100"
host_groups = [
    {preset = "a100-40gb", num_hosts = 1},
    {preset = "v100-32gb", num_hosts = 1},
]
"""


def _quantised(state, batch):
    """A codebook between two layers: its passes fuse as one program, less as two."""

    def loss(weights):
        hidden = jnp.tanh(batch @ weights["up"])
        distances = ((hidden[:, None] - state["codes"]) ** 2).sum(-1)
        chosen = state["codes"][distances.argmin(-1)]
        passed = hidden + jax.lax.stop_gradient(chosen - hidden)
        return jnp.mean((passed @ weights["down"] - batch) ** 2) + jnp.mean((chosen - hidden) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["weights"])
    moved = jax.tree.map(lambda w, g: w - 0.1 * g, state["weights"], gradients)
    return {"weights": moved, "codes": state["codes"]}, value


@pytest.mark.parametrize("options", [{}, {"num_stages": 1}, {"num_microbatches": 1}])
def test_one_stage_on_part_of_a_mixed_cluster_is_one_program(options):
    state = {
        "weights": {
            "up": jax.ShapeDtypeStruct((6, 4), jnp.float32),
            "down": jax.ShapeDtypeStruct((4, 6), jnp.float32),
        },
        "codes": jax.ShapeDtypeStruct((8, 4), jnp.float32),
    }
    step = Step(_quantised, (state, jax.ShapeDtypeStruct((8, 6), jnp.float32)))
    mixed = parse_cluster(tomllib.loads(HOSTS))
    plan = make_plan(step, mixed, Options(**options)).plan
    assert plan.num_stages == 1
    assert 0 < plan.lower_bound <= plan.step_seconds


def test_one_stage_is_not_planned_again_on_parts_of_several_kinds_of_devices():
    step, best = Step(_step, (WEIGHTS, BATCH)), _plan(num_stages=1)
    mixed = calibrated_model(parse_cluster(tomllib.loads(HOSTS)))
    assert _on_parts(best, [math.inf], step, mixed, Options()) is None
    alike = calibrated_model(cluster("h100:2"))
    assert _on_parts(best, [math.inf], step, alike, Options()) is not None


def test_plans_predicted_to_be_no_faster_than_one_at_hand_are_not_solved():
    planned, solved = _plan(num_stages=1), []

    def prospect(predicted, seconds):
        def finish():
            solved.append(predicted)
            return evolve(planned, plan=evolve(planned.plan, step_seconds=seconds))

        return Prospect(predicted, finish)

    # the first takes longer than predicted, so that the second may be faster, and is
    prospects = [prospect(4.0, 1.0), prospect(2.0, 2.5), prospect(1.0, 3.0), prospect(2.5, 1.0)]
    best = _finished(prospects, [])
    assert best is not None and best.plan.step_seconds == 2.5
    assert solved == [1.0, 2.0]


def test_memory_that_nothing_fits_says_what_is_missing():
    with pytest.raises(InfeasibleError, match="lacks at least") as caught:
        _plan(memory=1024.0)
    assert caught.value.missing_bytes > 0


def test_less_memory_shards_more():
    roomy = _plan(num_stages=1, num_microbatches=1).plan.shardings[0].memory
    limit = sum(roomy.values()) - 0.4 * roomy["state"]
    tight = _plan(num_stages=1, num_microbatches=1, memory=limit).plan.shardings[0].memory
    assert sum(tight.values()) <= limit < sum(roomy.values())


def test_a_written_plan_is_restored_without_searching():
    planned = _plan(num_stages=2)
    plan = from_json(to_json(planned.plan), ParallelPlan)
    again = restore(Step(_step, (WEIGHTS, BATCH)), plan, Options())
    assert [problem_hash(s) for s in again.selections] == [
        problem_hash(s) for s in planned.selections
    ]


def test_a_plan_for_other_shapes_is_refused_with_the_difference():
    plan = _plan(num_stages=1).plan
    other = {**WEIGHTS, "up": jax.ShapeDtypeStruct((32, 128), jnp.float32)}
    other["down"] = jax.ShapeDtypeStruct((128, 32), jnp.float32)
    with pytest.raises(PlanError, match=r"float32\[32,64\].*float32\[32,128\]"):
        restore(Step(_step, (other, BATCH)), plan, Options())
