"""Layers whose host launches kernel by kernel: what runs on devices, or all launches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layered_plan import shapes, step

import alpa_meta
from alpa_interchange import SubmeshSpec
from alpa_meta.inter_op.layer_costs import LayerCosts
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.intra_op.bucketed_solution import solve_in_buckets
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build
from alpa_meta.operators import kernel_kind
from alpa_meta.options import Options
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

OPTIONS = Options(num_layers=4)
COUNT = 4


def _costs(name, width, shape=(1,)):
    """Return the costs of the layers and their choice on a cluster, with microbatches of 256."""
    model = CostModel(cluster(name))
    program = Step(step, shapes(width, 256 * COUNT)).program(COUNT)
    outlook = outlook_of(program, OPTIONS, model.cluster)[0]
    scope = stage_scope(program, outlook.staging, 0, 1, {}, apart=True)
    submesh = SubmeshSpec(num_hosts=1, devices_per_host=math.prod(shape))
    mesh = model.logical_mesh(submesh, shape, ("x", "y")[: len(shape)])
    selection = build(scope.eqns, MeshCosts(mesh, model), "whole")
    choice = solve_in_buckets(selection, OPTIONS).choice
    assert choice is not None
    return LayerCosts(scope, selection, outlook.num_layers), selection, choice


def _passes(costs, choice):
    found = costs.under(choice)
    return (found.forward + found.backward) / COUNT


def _others(selection, choice):
    """Return choices that are possible, each with one node of `choice` changed more."""
    random, found = np.random.default_rng(0), [tuple(choice)]
    for node in random.permutation(selection.problem.num_nodes).tolist():
        other = list(found[-1])
        other[node] = int(random.integers(selection.problem.num_strategies[node]))
        if np.isfinite(selection.seconds.under(other)).all():
            found.append(tuple(other))
    assert len(set(found)) > 5
    return found[1:]


def test_a_narrow_layer_takes_its_launches_and_a_wide_one_its_kernels():
    costs, selection, choice = _costs("h100:1+nanotron", 128)
    program = selection.costs.model.program
    assert program is not None
    products = 6  # of a layer: two forward, four backward
    narrow = _passes(costs, choice)
    np.testing.assert_allclose(narrow[1:-1], products * program.launch, rtol=1e-3)
    # wide kernels run so long that the host is ahead of them
    costs, selection, choice = _costs("h100:1+nanotron", 16384)
    busy = selection.seconds.under(choice)
    whole = sum(
        s for s, phase in zip(busy, selection.stage.phases, strict=True) if phase != "update"
    )
    assert _passes(costs, choice).sum() == pytest.approx(whole / COUNT, rel=1e-3)
    assert whole / COUNT > 10 * narrow.sum()


def test_launches_and_kernels_of_a_layer_are_added_up_before_they_are_compared():
    # a width at which both take about as long: some kernels take less than their launch, some more
    costs, selection, choice = _costs("h100:1+nanotron", 1536)
    program = selection.costs.model.program
    assert program is not None
    layers, phases = costs.facts.layers, selection.stage.phases
    busy = selection.seconds.under(choice) / COUNT
    passes = [position for position, phase in enumerate(phases) if phase != "update"]
    device = np.bincount(layers[passes], busy[passes])
    product = np.array([kernel_kind(eqn) == "matmul" for eqn in selection.stage.eqns])
    launch = program.launch * product
    launches = np.bincount(layers[passes], launch[passes])
    apart = np.bincount(layers[passes], np.maximum(busy, launch)[passes])
    found = _passes(costs, choice)
    np.testing.assert_allclose(found, program.passes_seconds(device, launches))
    inner = slice(1, -1)
    assert (found >= np.maximum(device, launches) * (1 - 1e-9)).all()
    assert (found[inner] < 0.98 * apart[inner]).all()


def test_collectives_inside_layers_are_launched_too():
    alone, _, one = _costs("h100:1+nanotron", 128)
    costs, selection, choice = _costs("h100:8+nanotron", 128, (8,))
    program = selection.costs.model.program
    assert program is not None
    more = max(float(_passes(costs, other).max()) for other in _others(selection, choice))
    assert more > _passes(alone, one).max() + program.launch_seconds("all-reduce", 8)


@pytest.mark.parametrize("width", [128, 2048])
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_no_choice_takes_less_than_its_devices_or_the_floors(width, shape):
    costs, selection, best = _costs("h100:8+nanotron", width, shape)
    found = solve_in_buckets(selection, OPTIONS)
    for choice in (best, *_others(selection, best)):
        taken = costs.under(choice)
        whole = float((taken.forward + taken.backward + taken.update).sum())
        assert found.lower_bound is not None
        assert whole >= found.lower_bound * (1 - 1e-9)
        floor = costs.floors()
        assert (taken.forward + taken.backward >= floor[:, 0] * (1 - 1e-9)).all()


def test_a_slower_link_makes_layers_that_wait_for_launches_no_slower():
    costs, _, choice = _costs("h100:8+nanotron", 128, (8,))
    sent, taken = costs.sent(choice), costs.under(choice)
    assert taken.slowed is not None and (taken.slowed[1:-1] > 2).all()
    assert sent["forward"].sum() < 1e-3 * taken.forward.sum()


@pytest.mark.parametrize("stated", ["h100:4+nanotron", "h100:4+megatron,staged"])
def test_a_plan_for_a_stated_program_is_no_faster_than_its_bound_or_its_stages(stated):
    found = alpa_meta.parallelize(
        step, cluster=stated, num_microbatches=4, num_layers=4, num_stages=2, cache=False
    ).lower(*shapes(512, 64))
    plan = found.plan
    assert 0 < plan.lower_bound <= plan.step_seconds
    slowest = max(
        4 * (stage.candidate.forward_seconds + stage.candidate.backward_seconds)
        for stage in plan.stage_plan.stages
    )
    assert plan.step_seconds >= slowest


def test_a_planned_stage_takes_what_its_program_takes_beside_layers():
    costs, selection, choice = _costs("h100:1+nanotron", 512)
    program = selection.costs.model.program
    assert program is not None
    plan = (
        alpa_meta.parallelize(
            step, cluster="h100:1+nanotron", num_microbatches=COUNT, num_layers=4, num_stages=1,
            recompute="none", cache=False,
        )
        .lower(*shapes(512, 256 * COUNT))
        .plan
    )  # fmt: skip
    (stage,) = plan.stage_plan.stages
    layers = _passes(costs, choice).sum()
    taken = stage.candidate.forward_seconds + stage.candidate.backward_seconds
    assert taken == pytest.approx(layers + sum(program.microbatch_seconds), rel=0.01)
    assert sum(program.microbatch_seconds) > 0.02 * taken
    assert stage.candidate.step_seconds > program.step_seconds > 0


def test_a_compiled_program_waits_for_no_launch():
    def step(weight, batch):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(weight)
        return weight - 0.1 * gradient, value

    taken = []
    for name in ("h100:1+xla", "h100:1+nanotron"):
        args = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
        lowered = alpa_meta.parallelize(step, cluster=name, cache=False).lower(*args)
        taken.append(lowered.plan.step_seconds)
    assert taken[0] < taken[1] / 10
