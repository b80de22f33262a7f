"""A saved plan that says something else than its own choices come to is refused, with the place."""

import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting_step import BATCH, STATE, step

import alpa_meta as alpa
from alpa_interchange import ParallelPlan, from_json, to_json


def layered(weights, x):
    def loss_of(weights):
        h = x
        for one in weights:
            h = jnp.tanh(h @ one)
        return jnp.mean(h**2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


WEIGHTS = [jax.ShapeDtypeStruct((16, 16), np.float32)] * 4
ROWS = jax.ShapeDtypeStruct((8, 16), np.float32)


@pytest.fixture(scope="module")
def saved():
    """Return the JSON of a plan of two stages."""
    made = alpa.parallelize(layered, cluster="host:4", num_stages=2, num_microbatches=2)
    return to_json(made.plan_for(WEIGHTS, ROWS))


def restored(text, **changes):
    """Return the plan that `layered` has of a saved one with values put in by their place, and no
    hash, which would not match."""
    document = json.loads(text)
    del document["sha256"]
    for place, value in changes.items():
        *path, last = place.split("__")
        holder = document["value"]
        for name in path:
            holder = holder[int(name) if isinstance(holder, list) else name]
        holder[int(last) if isinstance(holder, list) else last] = value
    plan = from_json(json.dumps(document), ParallelPlan)
    return alpa.parallelize(layered, plan=plan).plan_for(WEIGHTS, ROWS)


def test_a_plan_as_it_was_saved_says_what_its_choices_come_to(saved):
    assert restored(saved) == from_json(saved, ParallelPlan)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("step_seconds", 0.5),
        ("lower_bound", 0.25),  # above the step's own seconds
        ("program__batch_size", 64),
        ("program__num_ops", 3),
        ("layers__0__forward_flops", 1.0),
        ("stage_plan__step_seconds", 0.5),
        ("stage_plan__peak_bytes__1", 1.0),
        ("stage_plan__stages__1__candidate__forward_seconds", 0.0),
        ("stage_plan__stages__0__candidate__state_bytes", 0.0),
        ("shardings__0__memory__state", 0.0),
        ("shardings__1__collective_seconds__forward", 7.0),
        ("shardings__0__communication", {"all-reduce": 1.0}),
        ("shardings__0__activation_specs", {}),
        ("tasks__tasks__0__outputs", []),
        ("tasks__outputs", []),
        ("tasks__per_step", []),
    ],
)
def test_a_figure_or_task_that_was_edited_is_refused_with_its_place(saved, place, value):
    where = re.escape(re.sub(r"\.(\d+)", r"[\1]", place.replace("__", ".")))
    with pytest.raises(alpa.PlanError, match=f"the plan was edited or damaged: it says {where}"):
        restored(saved, **{place: value})


def test_meshes_and_microbatches_that_contradict_each_other_are_refused(saved):
    with pytest.raises(alpa.PlanError, match="stage 1 is on another mesh in `shardings` than in"):
        restored(saved, stage_plan__stages__1__device_ids=[3, 2])
    with pytest.raises(alpa.PlanError, match="stage 0 is for 4 microbatches, the plan for 2"):
        restored(saved, stage_plan__stages__0__candidate__num_microbatches=4)
    with pytest.raises(alpa.PlanError, match="schedule must be one of .*, got 'fast'"):
        restored(saved, stage_plan__schedule="fast")
    with pytest.raises(alpa.PlanError, match=r"stages has in flight, but \[0, 1\]"):
        restored(saved, stage_plan__in_flight=[0, 1])


def test_a_cluster_that_allows_no_figures_is_refused(saved):
    slow = json.loads(saved)["value"]["cluster"]
    slow["host_groups"][0]["device"]["memory_bandwidth"] = 1e-320
    with pytest.raises(alpa.PlanError, match="cluster has a rate of .* must be from 1 to 1e.24"):
        restored(saved, cluster=slow)


def test_figures_of_another_version_or_profile_are_not_compared(saved):
    made = restored(saved, provenance__jax="0.0.1", step_seconds=0.5, tasks__per_step=[])
    assert made.step_seconds == 0.5
    assert made.tasks == from_json(saved, ParallelPlan).tasks  # what runs is of the choices
    with pytest.raises(alpa.PlanError, match="it says step_seconds"):
        restored(saved, step_seconds=0.5)


def test_what_says_nothing_of_how_the_step_runs_may_differ(saved):
    document = json.loads(saved)
    for sharding in document["value"]["shardings"]:
        for group in sharding["operators"]:
            group["source"] = "moved.py:1"
        sharding["solution"]["seconds"] = 99.0
    restored(json.dumps(document))


def test_every_kind_of_plan_is_restored_as_it_was_made():
    kinds = (
        {"num_stages": 1, "num_microbatches": 2},
        {"num_stages": 2, "num_microbatches": 4, "schedule": "gpipe"},
        {"num_stages": 2, "num_microbatches": 4, "recompute": "full"},
        {"num_stages": 1, "num_microbatches": 1, "executor": "constraint"},
    )
    for options in kinds:
        plan = alpa.parallelize(layered, cluster="host:4", **options).plan_for(WEIGHTS, ROWS)
        assert restored(to_json(plan)) == plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = alpa.parallelize(step, cluster="host:2").plan_for(STATE, BATCH)
    assert alpa.parallelize(step, plan=plan).plan_for(STATE, BATCH) == plan
