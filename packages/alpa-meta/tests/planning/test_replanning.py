"""Re-planning from a kept menu: as a search of the changed problem, and where it changes."""

from typing import Any

import pytest
from layered_plan import CLUSTER, LAYERS, lowered

import stage_dp
from alpa_meta.errors import InfeasibleError, PlanError
from alpa_meta.planning.menu_problem import problem_of
from alpa_meta.planning.replanning import changed_cluster, replan
from cost_model import cluster

HERE = cluster(CLUSTER)


@pytest.fixture(scope="module")
def plan():
    return lowered().plan


@pytest.fixture(scope="module")
def menu():
    return lowered().menu


def test_nothing_changes_where_nothing_was_changed(plan, menu):
    found = replan(plan, menu)
    assert not found.changed and found.lacking_bytes == 0
    assert found.kept_seconds == found.before_seconds >= found.plan.step_seconds
    assert found.bound_holds and found.bound == pytest.approx(plan.lower_bound, rel=0.2)
    assert found.bound <= found.plan.step_seconds


@pytest.mark.sample(changed=2)
@pytest.mark.parametrize(
    "changed",
    [{"hosts": {0: 1}}, {"links": {"inter-host": 12.5e9}}, {"links": {"intra-host": 20e9}}],
    ids=["one host", "faster between hosts", "slower inside"],
)
def test_it_is_no_slower_than_a_search_of_the_changed_problem(changed, plan, menu):
    there = changed_cluster(HERE, **changed)
    found = replan(plan, menu, there)
    searched = stage_dp.solve_joint(problem_of(menu, there))
    assert found.plan.step_seconds <= searched.step_seconds * 1.001
    assert found.bound <= searched.step_seconds


def test_a_faster_link_is_never_slower_and_one_host_fewer_is_never_faster(plan, menu):
    before = replan(plan, menu).plan.step_seconds
    fast = replan(plan, menu, changed_cluster(HERE, links={"inter-host": 12.5e9}))
    assert fast.plan.step_seconds <= before and not fast.bound_holds
    few = replan(plan, menu, changed_cluster(HERE, hosts={0: 1}))
    assert few.plan.step_seconds >= before and few.kept_seconds is None
    assert max(device for stage in few.plan.stages for device in stage.device_ids) < 8


def test_its_settings_plan_in_full_what_it_says(plan, menu):
    found = replan(plan, menu, changed_cluster(HERE, hosts={0: 1}))
    settings: dict[str, Any] = dict(found.settings)
    assert len(settings["recompute"]) == LAYERS
    assert settings["num_stages"] == len(found.plan.stages)


def test_less_memory_than_the_plan_needs_gives_another_plan_or_says_what_lacks(plan, menu):
    peak = max(replan(plan, menu).plan.peak_bytes)
    found = replan(plan, menu, memory=peak * 0.95)
    assert found.changed and max(found.plan.peak_bytes) <= peak * 0.95
    assert 0 < found.lacking_bytes <= peak * 0.06
    with pytest.raises(InfeasibleError, match="plan anew"):
        replan(plan, menu, memory=1e6)


def test_other_names_and_groups_are_refused():
    with pytest.raises(PlanError, match="intra-host, inter-host, inter-group"):
        changed_cluster(HERE, links={"ethernet": 1e9})
    with pytest.raises(PlanError, match="no host group 1"):
        changed_cluster(HERE, hosts={1: 2})
    assert changed_cluster(HERE) == HERE


def test_a_plan_whose_meshes_run_several_stages_is_planned_again():
    made = lowered(schedule="interleaved-1f1b")
    here = replan(made.plan, made.menu)
    assert not here.changed and here.plan.num_meshes == 2 and len(here.plan.stages) == 4
    assert here.plan.step_seconds == here.kept_seconds == here.before_seconds
    slow = replan(made.plan, made.menu, changed_cluster(HERE, links={"intra-host": 20e9}))
    assert slow.kept_seconds is not None and here.kept_seconds is not None
    assert slow.plan.step_seconds <= slow.kept_seconds and here.kept_seconds < slow.kept_seconds
    most = max(stage_dp.device_bytes(here.plan))
    less = replan(made.plan, made.menu, memory=0.95 * most)
    assert less.changed and max(stage_dp.device_bytes(less.plan)) <= 0.95 * most
    assert less.lacking_bytes == pytest.approx(0.05 * most)
