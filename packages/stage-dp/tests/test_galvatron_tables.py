"""The joint search on Galvatron's inputs: never slower than the plans its programs chose."""

import galvatron_costs
import galvatron_recent
import pytest
from attrs import evolve

from stage_dp import order, pipeline_time, solve_joint

CASES = galvatron_costs.CASES
SEARCHES = [case for case in CASES["searches"] if case["best"]]


def named(case):
    return f"{case['model']}{sum(case['layers'])}-{case['memory_gb']}GB"


@pytest.mark.parametrize("case", SEARCHES, ids=named)
def test_no_plan_is_slower_than_galvatrons_at_its_batch_and_stages(case):
    theirs = case["best"]
    assert galvatron_costs.their_seconds(case) == pytest.approx(theirs["seconds"], rel=1e-7)
    problem = galvatron_costs.joint_problem(case, theirs["batch"], theirs["stages"])
    plan = solve_joint(problem)
    assert plan.lower_bound <= plan.step_seconds <= theirs["seconds"] * (1 + 1e-7)
    assert max(plan.peak_bytes) <= problem.device_groups[0].memory * (1 + 1e-9)


@pytest.mark.parametrize("row", CASES["partitions"], ids=lambda row: row["case"])
def test_the_partition_is_as_good_as_the_best_with_free_strategies(row):
    case = next(case for case in SEARCHES if named(case) == row["case"])
    plan = solve_joint(galvatron_costs.joint_problem(case, row["batch"], len(row["cut"])))
    assert row["batch"] / plan.step_seconds >= row["free"] * (1 - 1e-7)


@pytest.mark.parametrize("case", CASES["recent"], ids=lambda c: f"{c['memory_gb']}-{c['batch']}")
def test_no_pipeline_is_slower_than_galvatrons_with_counts_and_stages_free(case):
    count = case["best"]["count"]
    stages = galvatron_recent.their_stages(case, transitions=False)
    formula = galvatron_recent.formula_seconds([sum(stage) for stage in stages], count)
    assert case["batch"] / formula == pytest.approx(case["best"]["samples_per_second"], rel=1e-7)
    theirs = galvatron_recent.their_stages(case)
    path = pipeline_time(order("1f1b", len(theirs), count), *zip(*theirs, strict=True))
    problem = galvatron_recent.joint_problems(case)[-1]
    plan = solve_joint(evolve(problem, proof=False))
    assert plan.step_seconds <= path.step_seconds * (1 + 1e-9)
