"""The memory of a stage on one device is that of its selection problem there."""

import numpy as np
import pytest

from alpa_interchange import SubmeshSpec
from alpa_meta.corpus import build as corpus_model
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.one_device import memory_on_one_device
from alpa_meta.intra_op.selection import build
from alpa_meta.options import Options
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

MODEL = CostModel(cluster("h100:4"))


@pytest.mark.sample(size=1, name=2)
@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize(
    ("name", "recompute"),
    [("moe-sort", "selective"), ("gpt-scan", None), ("gpt", None), ("gpt", "full"), ("unet", None)],
)
def test_memory_is_that_of_the_problem_on_one_device(name, recompute, size):
    model = corpus_model(name, size)
    program = Step(model.train_step, (model.state, model.batch)).program(2)
    outlook, _ = outlook_of(program, Options(recompute=recompute), MODEL.cluster)
    scope = stage_scope(outlook.program, outlook.staging, 0, 1)
    device = SubmeshSpec(num_hosts=1, devices_per_host=1)
    costs = MeshCosts(MODEL.logical_mesh(device, (1,), ("x",)), MODEL)
    found = memory_on_one_device(scope.eqns, costs)
    selection = build(scope.eqns, costs, "one device")
    whole = selection.memory.usage([0] * selection.problem.num_nodes)
    np.testing.assert_array_equal(found.memory.usage([0]), whole)
    assert found.times == selection.times
