"""What links take of a choice's seconds: the rest when they are free, in proportion when slower."""

import numpy as np
import pytest
from attrs import evolve
from layered_plan import shapes, step

from alpa_meta.inter_op.layer_costs import LayerCosts
from alpa_meta.inter_op.meshes import whole_cluster
from alpa_meta.inter_op.sent_costs import collective_seconds
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.intra_op.bucketed_solution import solve_in_buckets
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build, same_choice
from alpa_meta.options import Options
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

OPTIONS = Options(num_layers=4)


def _built(model, shape):
    outlook = outlook_of(Step(step, shapes(1024, 4096)).program(4), OPTIONS, model.cluster)[0]
    window = outlook.window
    scope = stage_scope(outlook.program, window.staging, 0, 1, {}, apart=True, window=window)
    mesh = model.logical_mesh(whole_cluster(model.cluster), shape, ("x", "y")[: len(shape)])
    return outlook, scope, build(scope.eqns, MeshCosts(mesh, model), "whole")


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_the_parts_say_what_a_slower_link_costs(shape):
    group = cluster("h100:8").host_groups[0]
    link = evolve(group.intra_host, bandwidth=100e9, latency=0.0)
    fast = CostModel(evolve(cluster("h100:8"), host_groups=(evolve(group, intra_host=link),)))
    half = evolve(link, bandwidth=50e9)
    slow = CostModel(evolve(cluster("h100:8"), host_groups=(evolve(group, intra_host=half),)))
    outlook, scope, here = _built(fast, shape)
    choice = solve_in_buckets(here, OPTIONS).choice
    of = (outlook.num_layers, outlook.window)
    costs = LayerCosts(scope, here, *of)
    assert choice is not None
    sent, before = costs.sent(choice), costs.under(choice)
    _, other_scope, there = _built(slow, shape)
    same = same_choice(here, choice, there)
    assert same is not None
    after = LayerCosts(other_scope, there, *of).under(same)
    assert sum(part[..., 1].sum() for part in sent.values()) > 0
    for phase in ("forward", "backward", "update"):
        more = sent[phase].sum(axis=(1, 2))
        np.testing.assert_allclose(
            getattr(before, phase) + more, getattr(after, phase), rtol=0.01, atol=1e-9
        )


def test_the_seconds_of_all_collectives_are_those_of_their_parts():
    _, scope, selection = _built(CostModel(cluster("h100:8")), (8,))
    choice = solve_in_buckets(selection, OPTIONS).choice
    assert choice is not None
    found = collective_seconds(selection, choice)
    whole = selection.seconds.under(choice).sum()
    assert 0 <= sum(found.values()) <= whole + sum(selection.traffic.extra(choice).values())
