"""Two plans beside one another."""

import pytest
from attrs import astuple
from layered_plan import lowered

from alpa_meta.errors import PlanError
from alpa_meta.report.plan_difference import plan_difference
from alpa_meta.report.predicted_simulation import predicted_simulation


def first():
    return lowered(num_stages=2).plan


def second():
    return lowered(num_stages=4, num_microbatches=16).plan


def test_a_plan_differs_from_itself_in_nothing():
    found = plan_difference(first(), first())
    assert found.decisions == found.shardings == ()
    assert found.costs[0] == found.costs[1]


def test_it_names_the_decisions_and_the_state_that_differ():
    found = plan_difference(first(), second())
    by_name = {one.what: (one.first, one.second) for one in found.decisions}
    assert by_name["stages"] == ("2", "4")
    assert by_name["microbatches"] == ("8", "16")
    assert by_name["stage 3: layers"] == ("no such stage", "3")
    assert all(one.first != one.second for one in found.shardings)
    assert found.costs[1].device_bytes == tuple(one.peak_bytes for one in second().shardings)


@pytest.mark.parametrize("make", [first, second], ids=["two stages", "four"])
def test_the_split_adds_up_to_the_simulated_step(make):
    plan = make()
    split = plan_difference(plan, plan).costs[0].time
    assert split is not None
    assert sum(astuple(split)) == pytest.approx(predicted_simulation(plan).step_seconds)
    assert all(part >= 0 for part in astuple(split))


def test_plans_of_different_programs_are_refused_with_the_first_difference():
    with pytest.raises(PlanError, match=r"of one program.*'up'|of one program.*'down'"):
        plan_difference(first(), lowered(width=1024, num_stages=2).plan)
