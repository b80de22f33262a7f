"""Token slices pass through the stages of a pipeline, and give what one device does."""

import jax
import numpy as np
import optax
import pytest
from causal_models import Model, batch, loss, parameters

import alpa_meta as alpa
from alpa_interchange import ParallelPlan, from_json, to_json
from alpa_meta.errors import PlanError

OPTIMISER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2))


def step_and_arguments(model):
    def step(state, given):
        params, moments = state
        value, found = jax.value_and_grad(loss(model))(params, given)
        updates, moments = OPTIMISER.update(found, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = parameters(model)
    return step, ((params, OPTIMISER.init(params)), batch(model))


def parallel(step, cluster, **options):
    return alpa.parallelize(step, cluster=cluster, donate=False, cache=False, **options)


def check(step, args, sliced):
    expected, found = jax.jit(step)(*args), sliced.gather(sliced(*args))
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-10, atol=1e-12)


def runs(sliced, mesh):
    found = sliced.schedule.programs[mesh]
    return [
        (i.phase, i.microbatch, i.slice_index)
        for i in found
        if i.kind == "run" and i.phase in ("forward", "backward")
    ]


def test_two_stages_of_two_microbatches_in_three_slices_give_what_one_device_does():
    step, args = step_and_arguments(Model(num_layers=2))
    sliced = parallel(
        step, "host:2", num_stages=2, num_microbatches=2, schedule="gpipe", token_slices=(5, 1, 6)
    )
    check(step, args, sliced)
    forwards = [("forward", m, k) for m in range(2) for k in range(3)]
    backwards = [("backward", m, k) for m in range(2) for k in (2, 1, 0)]
    assert runs(sliced, 0) == runs(sliced, 1) == forwards + backwards
    with pytest.raises(PlanError, match="num_token_slices is 3"):
        _ = alpa.Options(token_slices=(5, 7), num_token_slices=3).slice_request
    again = parallel(step, "host:2", plan=from_json(to_json(sliced.plan), ParallelPlan))
    assert again.plan_for(*args).tasks == sliced.plan.tasks


def test_one_stage_on_four_devices_gives_what_one_device_does():
    step, args = step_and_arguments(Model(scan=True, remat=True, num_layers=2))
    check(step, args, parallel(step, "host:4", num_stages=1, num_token_slices=3))


def test_a_step_that_is_not_causal_is_refused_before_it_is_planned():
    step, args = step_and_arguments(Model("bidirectional"))
    with pytest.raises(PlanError, match="reads tokens after its own"):
        parallel(step, "host:2", num_token_slices=2).plan_for(*args)
