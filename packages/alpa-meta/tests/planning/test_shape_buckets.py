"""Which batches take over a plan's choices, and what is said where they cannot."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_meta import api
from alpa_meta.planning.planner import make_plan
from alpa_meta.planning.shape_buckets import marked_dims, structural_difference
from alpa_meta.step.program import Step

WEIGHT = np.eye(8, dtype=np.float32)
FIXED: dict[str, Any] = {"cluster": "host:2", "num_stages": 1, "mesh_shape": (2,)}


def step(weight, batch):
    def loss(weight):
        y = (jnp.tanh(batch["x"] @ weight) @ weight).sum(axis=1)
        return jnp.mean((y - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(weight)
    return weight - gradient, value


def step_with_weights(weight, batch):
    weight, value = step(weight, batch)
    return weight, (value, batch["w"].sum())


def batch(examples=4, length=6, features=8):
    shapes = {"x": (examples, length, features), "y": (examples, 8)}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


MARKS = {"x": {0, 1}, "y": 0}


@pytest.fixture
def searches(monkeypatch):
    """Return the list of steps that a plan was searched for."""
    seen = []

    def counted(step, *rest):
        seen.append(step)
        return make_plan(step, *rest)

    monkeypatch.setattr(api, "make_plan", counted)
    return seen


def test_batches_that_differ_in_marked_dims_share_one_search(searches):
    parallel = alpa.parallelize(step, **FIXED, dynamic_dims=MARKS)
    plans = [parallel.plan_for(WEIGHT, batch(n, t)) for n, t in ((4, 6), (8, 6), (4, 12), (8, 6))]
    assert len(searches) == 1
    assert [bucket.taken_over for bucket in parallel.buckets] == [False, True, True]
    assert plans[1] is plans[3]
    specs = [plan.shardings[0].state_specs["weight"] for plan in plans]
    assert len(set(specs)) == 1
    assert [plan.program.batch_size for plan in plans] == [4, 8, 4, 8]


def test_time_and_memory_are_predicted_for_the_new_sizes():
    parallel = alpa.parallelize(step, **FIXED, dynamic_dims=MARKS)
    small = parallel.plan_for(WEIGHT, batch())
    large = parallel.plan_for(WEIGHT, batch(64, 600))
    assert large.step_seconds > 2 * small.step_seconds
    assert large.shardings[0].peak_bytes > 10 * small.shardings[0].peak_bytes
    assert large.lower_bound == 0.0
    assert "choices taken over, predicted" in str(parallel.buckets[1])
    assert parallel.buckets[1].shapes["batch['x']"] == (64, 600, 8)


def test_what_is_not_marked_is_planned_afresh_with_the_reason(searches):
    parallel = alpa.parallelize(step, **FIXED, dynamic_dims={"x": 1, "y": None})
    parallel.plan_for(WEIGHT, batch())
    with pytest.warns(UserWarning, match=r"dim 0 of batch\['x'\] is 8 instead of 4"):
        parallel.plan_for(WEIGHT, batch(8))
    assert len(searches) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel.plan_for(WEIGHT, batch(8, 12))  # the second search serves its own buckets
    assert len(searches) == 2


def test_a_size_that_the_plan_does_not_divide_is_planned_afresh(searches):
    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, np.float32)

    parallel = alpa.parallelize(step, cluster="h100:2", num_stages=1, dynamic_dims=MARKS)
    weight = shaped(2048, 2048)
    parallel.plan_for(weight, {"x": shaped(4, 4096, 2048), "y": shaped(4, 2048)})
    with pytest.warns(UserWarning, match="not divisible for this batch"):
        parallel.plan_for(weight, {"x": shaped(3, 4097, 2048), "y": shaped(3, 2048)})
    assert len(searches) == 2
    assert "not divisible" in parallel.buckets[1].reason


def test_a_batch_of_another_number_of_microbatches_is_planned_afresh():
    parallel = alpa.parallelize(step, cluster="host:2", num_stages=1, dynamic_dims=MARKS)
    origin = alpa.parallelize(step, **FIXED, num_microbatches=2).plan_for(WEIGHT, batch())
    restored = alpa.parallelize(step, plan=origin, dynamic_dims=MARKS)
    assert restored.plan_for(WEIGHT, batch(8)).num_microbatches == 2
    with pytest.warns(UserWarning, match="2 microbatches, which do not divide 3 examples"):
        restored.plan_for(WEIGHT, batch(3))
    assert parallel.plan_for(WEIGHT, batch(3)).program.batch_size == 3


def test_a_batch_without_a_common_first_dim_shares_choices_in_marked_dims(searches):
    parallel = alpa.parallelize(
        step_with_weights, **FIXED, dynamic_dims={"x": 0, "y": 0, "w": None}
    )
    weights = np.ones(3, np.float32)
    plans = [parallel.plan_for(WEIGHT, {**batch(n), "w": weights}) for n in (4, 8)]
    assert len(searches) == 1
    assert [plan.program.batch_size for plan in plans] == [None, None]
    cut = alpa.parallelize(step_with_weights, **FIXED, num_microbatches=2).plan_for(
        WEIGHT, {**batch(), "w": np.ones(4, np.float32)}
    )
    restored = alpa.parallelize(step_with_weights, plan=cut, dynamic_dims=0)
    with pytest.warns(UserWarning, match="2 microbatches, but the arrays of the batch differ in"):
        restored.plan_for(WEIGHT, {**batch(), "w": weights})


def test_a_batch_that_needs_more_memory_than_there_is_is_refused():
    parallel = alpa.parallelize(step, **FIXED, dynamic_dims=MARKS, memory=2e4)
    parallel.plan_for(WEIGHT, batch())
    with (
        pytest.warns(UserWarning, match="bytes per device, 20,000 are there"),
        pytest.raises(alpa.InfeasibleError),
    ):
        parallel.plan_for(WEIGHT, batch(64, 600))


def test_a_step_of_another_structure_is_planned_afresh():
    def branching(weight, x):
        def loss(weight):
            y = x @ weight
            return jnp.mean((jnp.tanh(y) if x.shape[0] > 4 else y) ** 2)

        return weight - jax.grad(loss)(weight)

    parallel = alpa.parallelize(branching, **FIXED, dynamic_dims=0)
    parallel.plan_for(WEIGHT, np.ones((4, 8), np.float32))
    with pytest.warns(UserWarning, match=r"another program for this batch: \d+ operations instead"):
        parallel.plan_for(WEIGHT, np.ones((8, 8), np.float32))


def test_a_saved_plan_serves_buckets_it_was_not_made_for(searches):
    saved = alpa.parallelize(step, **FIXED).plan_for(WEIGHT, batch())
    parallel = alpa.parallelize(step, plan=saved, dynamic_dims=MARKS)
    assert parallel.plan_for(WEIGHT, batch(8, 12)).shardings[0].state_specs == (
        saved.shardings[0].state_specs
    )
    assert len(searches) == 1
    with pytest.raises(alpa.PlanError, match="another program"):
        alpa.parallelize(step, plan=saved).plan_for(WEIGHT, batch(8, 12))


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"x": 3, "y": 0}, r"got 3 for batch\['x'\], which has 3 dims"),
        ({"x": 0}, "must be a pytree prefix of the batch"),
        ({"x": {"a"}, "y": None}, "must be a dim, a set of dims or None"),
    ],
)
def test_marks_that_are_no_dims_are_refused(marks, message):
    with pytest.raises(alpa.PlanError, match=message):
        alpa.parallelize(step, **FIXED, dynamic_dims=marks).plan_for(WEIGHT, batch())


def test_marks_are_a_prefix_of_the_tuple_of_batch_arguments():
    def several(weight, x, y):
        return step(weight, {"x": x, "y": y})

    shapes = batch()
    traced = Step(several, (WEIGHT, shapes["x"], shapes["y"]))
    assert marked_dims(({0, -2}, None), traced) == {"x": {0, 1}, "y": frozenset()}
    assert marked_dims(0, traced) == {"x": {0}, "y": {0}}


def test_programs_of_two_sizes_have_one_structure():
    small, large = (Step(step, (WEIGHT, batch(n))).program(1) for n in (4, 8))
    assert structural_difference(small, large) == ""
    other = Step(lambda w, b: step(w + 1.0, b), (WEIGHT, batch())).program(1)
    assert "operation" in structural_difference(small, other)
