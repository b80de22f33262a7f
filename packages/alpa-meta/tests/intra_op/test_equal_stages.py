import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta import Options
from alpa_meta.inter_op.split_backward import with_split_backward
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.inter_op.staging import assign_stages
from alpa_meta.intra_op.equal_stages import Stages
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

MODEL = CostModel(cluster("h100:8"))
MESH = LogicalMesh(axes=(MeshAxis(name="x", size=4, bandwidth=1e9, latency=1e-6),))
LAYERS, BATCH = 6, 32


def _step(weights, batch):
    def loss(weights):
        x = batch
        for weight in weights:
            x = x + jnp.tanh(x @ weight["up"]) @ (2.0 * weight["down"])  # a literal by weight
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def _scopes(widths, in_flight, split):
    weights = [
        {
            "up": jax.ShapeDtypeStruct((64, w), jnp.float32),
            "down": jax.ShapeDtypeStruct((w, 64), jnp.float32),
        }
        for w in widths
    ]
    batch = jax.ShapeDtypeStruct((BATCH, 64), jnp.float32)
    program = Step(_step, (weights, batch)).program(4)
    outlook, layering = outlook_of(program, Options(num_layers=len(widths)), MODEL.cluster)
    staging = assign_stages(layering, range(1, len(widths)), program.jaxpr.outvars)
    if split:
        staging = with_split_backward(staging)
    return [
        stage_scope(outlook.program, staging, stage, held, num_delayed=held // 2 if split else 0)
        for stage, held in enumerate(in_flight)
    ]


@pytest.mark.parametrize("split", [False, True])
def test_the_problem_of_an_equal_stage_is_as_if_built_for_it(split):
    costs, stages = MeshCosts(MESH, MODEL), Stages()
    scopes = _scopes([256] * LAYERS, (6, 5, 4, 3, 2, 1), split)
    found = [stages.build(one.eqns, costs, f"stage {k}") for k, one in enumerate(scopes)]
    shared = {id(one.records) for one in found}
    assert len(shared) <= LAYERS - 2
    random = np.random.default_rng(0)
    for scope, selection in zip(scopes, found, strict=True):
        exact = build(scope.eqns, costs, selection.problem.name)
        assert selection.problem == exact.problem
        assert selection.stage is scope.eqns
        choice = [int(random.integers(count)) for count in exact.problem.num_strategies]
        np.testing.assert_array_equal(selection.seconds.under(choice), exact.seconds.under(choice))
        np.testing.assert_array_equal(selection.memory.usage(choice), exact.memory.usage(choice))
        for var in exact.sources:
            assert selection.spec(var, choice) == exact.spec(var, choice)
        for position in range(len(scope.eqns.eqns)):
            assert selection.strategy(position, choice) == exact.strategy(position, choice)


def test_stages_of_other_shapes_or_meshes_are_built_for_themselves():
    costs, stages = MeshCosts(MESH, MODEL), Stages()
    scopes = _scopes([256, 128, 256, 128], (1,) * 4, split=False)
    found = [stages.build(one.eqns, costs, "stage") for one in scopes]
    assert len({id(one.records) for one in found}) == len(scopes)
    wider = MeshCosts(
        LogicalMesh(axes=(MeshAxis(name="x", size=8, bandwidth=1e9, latency=1e-6),)), MODEL
    )
    assert stages.build(scopes[1].eqns, wider, "stage").records is not found[1].records
    assert stages.build(scopes[1].eqns, costs, "stage").records is found[1].records
