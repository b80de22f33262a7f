"""Problems made from kept menus: the same search again, on other links, in another process."""

import pytest
from attrs import evolve
from layered_plan import CLUSTER, lowered

import stage_dp
from alpa_interchange import KeptMenu, LogicalMesh, MeshAxis, SubmeshSpec, from_json, to_json
from alpa_interchange.menu import Affine, AxisPart, LayerRow, MeshMenu
from alpa_meta.errors import PlanError
from alpa_meta.planning.menu_problem import on_links, problem_of
from cost_model import cluster


def test_the_kept_menu_is_searched_to_the_same_plan():
    found = lowered(num_stages=2)
    menu = from_json(to_json(found.menu), KeptMenu)
    assert menu == found.menu
    plan = stage_dp.solve_joint(problem_of(menu))
    candidates = [stage.candidate for stage in found.plan.stage_plan.stages]
    assert [s.layer_start for s in plan.stages] == [c.layer_start for c in candidates]
    assert plan.schedule == found.plan.stage_plan.schedule
    # Floors that the search asked for are not kept, only those that hold for any microbatch.
    assert 0.99 * found.plan.lower_bound <= plan.lower_bound <= found.plan.lower_bound * (1 + 1e-9)


def test_on_other_links_only_the_parts_of_the_collectives_change():
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=2),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=2, bandwidth=4e9, latency=2e-6),)),
        rows=(
            (
                LayerRow(
                    forward=Affine(10.0, 1.0),
                    backward_input=Affine(5.0),
                    step_seconds=8.0,
                    forward_sent=(AxisPart(axis=0, latency=Affine(2.0), bytes=Affine(4.0, 0.5)),),
                    step_sent=(AxisPart(axis=0, bytes=Affine(8.0)),),
                ),
            ),
        ),
        layouts=("a", "b"),
        conversion={(0, 1): Affine(3.0)},
        conversion_sent={(0, 1): (AxisPart(axis=0, bytes=Affine(3.0)),)},
    )
    faster = evolve(mesh.logical, axes=(evolve(mesh.logical.axes[0], bandwidth=8e9, latency=1e-6),))
    changed = on_links(mesh, faster)
    (row,) = changed.rows[0]
    assert row.forward == Affine(10.0 - 1.0 - 2.0, 0.75)
    assert row.backward_input == Affine(5.0)
    assert row.step_seconds == 4.0
    assert changed.conversion[0, 1] == Affine(1.5)
    assert on_links(mesh, mesh.logical) is mesh


def test_other_devices_are_refused():
    menu = lowered(num_stages=2).menu
    with pytest.raises(PlanError, match="plan anew"):
        problem_of(menu, cluster("h100:16"))


def test_fewer_hosts_leave_out_the_meshes_that_do_not_fit():
    menu = lowered().menu
    one_host = evolve(cluster(CLUSTER).host_groups[0], num_hosts=1)
    problem = problem_of(menu, evolve(cluster(CLUSTER), host_groups=(one_host,)))
    assert all(mesh.submesh.num_hosts == 1 for mesh in problem.menu.meshes)
    assert len(problem.menu.meshes) < len(menu.menu.meshes)
    assert problem.device_groups[0].num_hosts == 1


def test_a_microbatch_larger_than_those_of_the_menu_has_no_floors():
    menu = lowered().menu
    assert all(mesh.floors for mesh in problem_of(menu).menu.meshes)
    (count,) = menu.counts
    problem = problem_of(menu, num_microbatches=count // 2)
    assert problem.counts == (count // 2, count)
    assert not any(mesh.floors for mesh in problem.menu.meshes)
