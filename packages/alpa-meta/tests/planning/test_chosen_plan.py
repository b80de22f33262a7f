import jax
import jax.numpy as jnp
import pytest
from attrs import evolve

import stage_dp
from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta import Options, parallelize
from alpa_meta.inter_op.split_backward import with_split_backward
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.inter_op.staging import assign_stages
from alpa_meta.intra_op.equal_stages import Stages
from alpa_meta.intra_op.memory_limit import solve_within
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.planning.chosen_plan import _bound_below
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.planning.plan_identity import problem_hash
from alpa_meta.planning.solved_stages import still_fits
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster
from stage_dp import BoundError

MODEL = CostModel(cluster("h100:8"))
MESH = LogicalMesh(axes=(MeshAxis(name="x", size=4, bandwidth=1e9, latency=1e-6),))
WEIGHT = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def _step(weights, batch):
    def loss(weights):
        x = batch
        for weight in weights:
            x = x + jnp.tanh(x @ weight) @ weight.T
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def test_strategies_of_an_equal_stage_do_only_where_they_fit_what_a_stage_holds():
    batch = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    program = Step(_step, ([WEIGHT] * 5, batch)).program(8)
    outlook, layering = outlook_of(program, Options(num_layers=5), MODEL.cluster)
    staging = with_split_backward(assign_stages(layering, range(1, 5), program.jaxpr.outvars))
    stages, costs = Stages(), MeshCosts(MESH, MODEL)
    few, many = (  # as in zero-bubble-h1, where later stages may hold as many as the first
        stages.build(
            stage_scope(outlook.program, staging, stage, held, num_delayed=delayed).eqns, costs, ""
        )
        for stage, held, delayed in ((1, 4, 0), (2, 5, 2))
    )
    assert problem_hash(few) == problem_hash(many)
    free = solve_within(few, Options(), 1e12)
    assert free.choice is not None
    limit = few.memory.peak(free.choice).total * 1.01
    assert still_fits(few, free, limit)
    assert not still_fits(many, free, limit)
    assert not still_fits(few, evolve(free, choice=None), limit)
    again = solve_within(many, Options(), limit)
    assert again.choice is None or still_fits(many, again, limit)


def test_a_bound_that_does_not_hold_is_withdrawn_or_an_error():
    assert _bound_below(1.0, 2.0) == 1.0
    assert _bound_below(1.0, 1 - 5e-4) == 1 - 5e-4
    with pytest.warns(UserWarning, match="how far it is from the best one is not known"):
        assert _bound_below(1.0, 0.98) == 0.0
    with pytest.raises(BoundError):
        _bound_below(1.0, 0.8)


def test_a_stage_with_fewer_microbatches_in_flight_keeps_more_than_an_equal_one_before_it():
    weights = [jax.ShapeDtypeStruct((1024, 4096), jnp.float32)] * 16
    batch = jax.ShapeDtypeStruct((64, 128, 1024), jnp.float32)
    options = Options(
        num_stages=4, num_microbatches=16, schedule="1f1b", recompute="none", memory=440e6
    )
    plan = parallelize(_step, cluster="p3.16xlarge:8", options=options).plan_for(weights, batch)
    one, other = (placed.candidate for placed in plan.stage_plan.stages[1:3])
    assert one.logical == other.logical
    # The same layers: the second has the room for what the first cannot keep.
    assert other.backward_seconds < 0.95 * one.backward_seconds
    assert plan.stage_plan.peak_bytes[1] < plan.stage_plan.peak_bytes[2] < 440e6


@pytest.mark.parametrize(("memory", "count"), [(384e6, 16), (1095e6, 4)])
def test_one_stage_that_just_fits_is_found_though_the_menu_says_that_it_does_not(memory, count):
    weights = [jax.ShapeDtypeStruct((1024, 2048), jnp.float32)] * 8
    batch = jax.ShapeDtypeStruct((64, 512, 1024), jnp.float32)
    options = Options(memory=memory, cache=False)
    plan = parallelize(_step, cluster="p3.16xlarge:1", options=options).plan_for(weights, batch)
    assert plan.num_microbatches == count
    assert 0.92 * memory < plan.stage_plan.peak_bytes[0] <= memory


@pytest.mark.parametrize(
    ("layers", "memory"),
    [
        # Forward passes that store less, as layers recompute, are below no floor of theirs.
        (12, 252e6),
        # Four stages share each mesh, and hold a quarter more than their rows say.
        (16, 317e6),
    ],
)
def test_pipelines_of_many_small_stages_are_planned_within_memory_and_above_their_bound(
    layers, memory
):
    weights = [jax.ShapeDtypeStruct((1024, 2048), jnp.float32)] * layers
    batch = jax.ShapeDtypeStruct((64, 512, 1024), jnp.float32)
    options = Options(memory=memory, num_microbatches=64, offload="none", cache=False)
    plan = parallelize(_step, cluster="p3.16xlarge:4", options=options).plan_for(weights, batch)
    assert max(stage_dp.device_bytes(plan.stage_plan)) <= memory
    assert 0.95 * plan.step_seconds < plan.lower_bound <= plan.step_seconds
