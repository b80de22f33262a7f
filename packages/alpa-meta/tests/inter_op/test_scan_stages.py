"""Stages cut scans where they meet, and a scan's body is planned once for all its pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_meta.inter_op.meshes import logical_meshes, submeshes
from alpa_meta.inter_op.scan_stages import cut_evenly, staged_program
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build
from alpa_meta.options import Options
from alpa_meta.planning.outlooks import outlook_in_pieces
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

WIDTH = 8
BATCH = np.ones((8, WIDTH), np.float32)


def step(params, batch):
    def loss(params):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return params - gradients, value


def traced(layers):
    return Step(step, (np.ones((layers, WIDTH, WIDTH), np.float32), BATCH))


def scan_lengths(program):
    return [eqn.params["length"] for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]


def test_a_program_without_scans_over_layers_is_not_cut():
    plain = Step(lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), (BATCH.T, BATCH))
    assert cut_evenly(plain.program(1)) is None
    assert outlook_in_pieces(plain.program(1), Options(), cluster("h100:8")) is None


@pytest.mark.parametrize("cuts", [[3], [1, 4], [2, 3, 5]])
def test_consecutive_pieces_of_a_stage_are_one_scan_again(cuts):
    found = outlook_in_pieces(traced(6).program(2), Options(num_layers=6), cluster("h100:8"))
    assert found is not None and found[0].cut is not None
    outlook, layering = found
    assert scan_lengths(outlook.program) == [1] * 12
    program, staging = staged_program(found[0].cut, layering, cuts)
    lengths = np.diff([0, *cuts, 6]).tolist()
    assert scan_lengths(program) == [*lengths, *reversed(lengths)]
    assert staging.num_stages == len(cuts) + 1
    homes = [
        (eqn.params["length"], phase, stage)
        for eqn, phase, stage in zip(staging.eqns, staging.phases, staging.stages, strict=True)
        if eqn.primitive.name == "scan"
    ]
    forward = [(length, "forward", stage) for stage, length in enumerate(lengths)]
    backward = [(length, "backward", stage) for length, _, stage in reversed(forward)]
    assert homes == forward + backward


def num_choices(layers):
    """Return the number of choices in the problem of the program in pieces on two devices."""
    found = outlook_in_pieces(traced(layers).program(2), Options(), cluster("h100:8"))
    assert found is not None
    outlook, _ = found
    model = CostModel(cluster("host:4"))
    submesh = next(found for found in submeshes(model.cluster) if found.num_devices == 2)
    (mesh,) = logical_meshes(model, submesh, 1)
    scope = stage_scope(outlook.program, outlook.staging, 0, 1)
    return len(build(scope.eqns, MeshCosts(mesh, model, 0), "").problem.node_names)


def test_a_body_is_planned_once_however_many_pieces_it_has():
    assert num_choices(12) == num_choices(6)


def test_the_plan_of_a_scan_says_where_its_stages_cut_it():
    parallel = alpa.parallelize(step, cluster="host:4", num_stages=2, num_microbatches=2)
    plan = parallel.plan_for(*traced(6).args)
    first, second = [item.path for item in plan.program.inputs if item.role == "state"]
    cut = int(first.removeprefix("params[0:").removesuffix("]"))
    assert (first, second) == (f"params[0:{cut}]", f"params[{cut}:6]")
    held = [set(sharding.state_specs) & {first, second} for sharding in plan.shardings]
    assert held == [{first}, {second}]


def test_a_plan_without_several_stages_keeps_the_scan_whole():
    parallel = alpa.parallelize(step, cluster="host:4", num_stages=1, num_microbatches=2)
    plan = parallel.plan_for(*traced(6).args)
    assert [item.path for item in plan.program.inputs] == ["params", "batch"]


def test_a_pin_of_a_stacked_array_holds_for_every_piece():
    parallel = alpa.parallelize(
        step,
        cluster="host:4",
        num_stages=2,
        num_microbatches=2,
        mesh_shape=(2,),
        pins={"params": (None, None, "x")},
    )
    plan = parallel.plan_for(*traced(6).args)
    for sharding in plan.shardings:
        (spec,) = [s for path, s in sharding.state_specs.items() if path.startswith("params")]
        assert spec.dims == ((), (), ("x",))
