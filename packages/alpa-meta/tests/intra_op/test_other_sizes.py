"""Problems priced at other sizes: a choice costs there what a problem built there says."""

import numpy as np
import pytest

from alpa_interchange import SubmeshSpec
from alpa_meta.corpus import build as corpus_model
from alpa_meta.inter_op.layer_costs import LayerCosts
from alpa_meta.inter_op.meshes import AXIS_NAMES
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build, same_choice
from alpa_meta.options import Options
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

MODEL = CostModel(cluster("h100:4"))
WHOLE = SubmeshSpec(num_hosts=1, devices_per_host=4)


def _scope(step, count, like=None):
    outlook, _ = outlook_of(step.program(count), Options(), MODEL.cluster, like=like)
    window = outlook.window
    scope = stage_scope(outlook.program, window.staging, 0, 1, apart=True, window=window)
    return outlook, scope


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gpt-scan", (4,)),
        ("gpt-scan", (2, 2)),
        pytest.param("moe-sort", (2, 2), marks=pytest.mark.bulk),
    ],
)
def test_a_choice_costs_at_another_size_what_a_problem_built_there_says(name, shape):
    model = corpus_model(name, "small")
    step = Step(model.train_step, (model.state, model.batch))
    outlook, here = _scope(step, 2)
    assert step.batch_size is not None
    _, there = _scope(step, step.batch_size // 2, outlook.program)
    mesh = MODEL.logical_mesh(WHOLE, shape, AXIS_NAMES[: len(shape)])
    selection = build(here.eqns, MeshCosts(mesh, MODEL), "both", (there.eqns,))
    priced = LayerCosts(here, selection, outlook.num_layers, outlook.window, [there])
    other = build(there.eqns, MeshCosts(mesh, MODEL), "there")
    exact = LayerCosts(there, other, outlook.num_layers, outlook.window)
    random = np.random.default_rng(0)
    names = [one.problem.strategy_names for one in (selection, other)]
    both = [
        [k for k, name in enumerate(one) if name in its] for one, its in zip(*names, strict=True)
    ]
    for _ in range(10):
        choice = tuple(int(random.choice(some)) for some in both)
        same = same_choice(selection, choice, other)
        assert same is not None
        mine, its = priced.under(choice, size=1), exact.under(same)
        for what in ("forward", "backward", "by_weight", "update"):
            np.testing.assert_allclose(getattr(mine, what), getattr(its, what), rtol=1e-9)
        for what in ("state", "gradients", "activations", "delayed", "transient"):
            np.testing.assert_allclose(getattr(mine, what), getattr(its, what), rtol=1e-9)


def test_running_sums_are_priced_at_one_example_whose_dim_has_no_factor():
    model = corpus_model("moe-einsum", "small")
    step = Step(model.train_step, (model.state, model.batch))
    outlook, here = _scope(step, 2)
    _, there = _scope(step, step.batch_size, outlook.program)
    mesh = MODEL.logical_mesh(WHOLE, (2, 2), AXIS_NAMES[:2])
    selection = build(here.eqns, MeshCosts(mesh, MODEL), "both", (there.eqns,))
    least = selection.seconds.least(1)
    assert np.isfinite(least).all() and least.sum() > 0
