"""Explanations: what the next best alternative of a decision costs."""

import pytest
from attrs import evolve
from layered_plan import LAYERS, lowered

import stage_dp
from alpa_meta.errors import PlanError
from alpa_meta.planning.explanation import Alternative, explain
from alpa_meta.planning.menu_prices import priced, restricted
from alpa_meta.planning.menu_problem import problem_of
from cost_model import calibrated_model


def planned():
    return lowered(num_stages=2)


@pytest.fixture(scope="module")
def found():
    return explain(planned().plan, planned().menu)


def test_every_decision_has_an_alternative(found):
    decisions = {one.decision for one in found.alternatives}
    assert {"schedule", "stages", "submesh", "boundary"} <= decisions
    assert found.step_seconds == planned().plan.step_seconds


def test_the_alternative_of_the_boundary_is_the_better_of_its_neighbours(found):
    problem = problem_of(planned().menu)
    base = priced(planned().plan, planned().menu, problem)
    (_, cut, first), (_, _, second) = base.stages
    schedule = planned().plan.stage_plan.schedule
    moved = [
        stage_dp.price_stages(problem, [(0, k, first), (k, LAYERS, second)], 8, schedule)
        for k in (cut - 1, cut + 1)
    ]
    (one,) = [one for one in found.alternatives if one.decision == "boundary"]
    least = min(plan.step_seconds for plan in moved)
    assert one.seconds == pytest.approx(least - found.menu_seconds)
    assert one.seconds > 0


def test_decisions_of_meshes_that_run_several_stages_are_priced():
    made = lowered(schedule="interleaved-1f1b")
    found = explain(made.plan, made.menu)
    base = priced(made.plan, made.menu, problem_of(made.menu))
    assert base.plan.num_meshes == 2 and len(base.stages) == LAYERS
    by_decision = {one.decision: one for one in found.alternatives}
    other = by_decision["schedule"]
    plain = evolve(base.problem, schedules=("1f1b", "eager-1f1b", "gpipe", "adaptive"))
    assert other.seconds is not None
    assert found.menu_seconds + other.seconds <= stage_dp.solve_joint(plain).step_seconds * 1.001
    assert other.chosen == "interleaved-1f1b" and "1f1b" in other.instead
    assert {"stages", "submesh", "boundary"} <= set(by_decision)


def test_another_number_of_stages_is_searched(found):
    (one,) = [one for one in found.alternatives if one.decision == "stages"]
    problem = problem_of(planned().menu)
    least = min(
        stage_dp.solve_joint(evolve(problem, num_stages=number)).step_seconds
        for number in (1, 3, 4)
    )
    assert found.menu_seconds + one.seconds == pytest.approx(least, rel=0.01)


def test_recomputation_is_priced_with_the_memory_that_it_saves():
    short = lowered(256, 16384, num_stages=2, memory="18MiB")
    kinds = [layer.recomputation for layer in short.plan.layers]
    found = explain(short.plan, short.menu).alternatives
    recomputed = [one for one in found if one.decision == "recomputation"]
    assert {one.chosen for one in recomputed} == set(kinds) != {"none"}
    again = [one for one in recomputed if one.chosen != "none"]
    assert all(one.instead == "nothing recomputed" for one in again)
    lacking = [one for one in again if one.lacking_bytes]
    assert lacking
    starts = [stage.candidate.layer_start for stage in short.plan.stage_plan.stages]
    for one in lacking:
        first = int(one.where.split()[1].split("-")[0])
        assert one.stage == sum(start <= first for start in starts) - 1
        assert f"stage {one.stage} exceeds memory by" in str(one)
    assert any(one.seconds is not None and one.seconds < 0 for one in lacking)
    for one in again:  # else it fits by holding its state in less
        assert one.lacking_bytes or (one.seconds is not None and one.seconds > 0)


def test_layers_of_their_own_keep_the_rows_that_are_allowed():
    problem = problem_of(planned().menu)
    menu = problem.menu
    left = restricted(problem, [1, 2], lambda row: row.batch_split == 1)
    some = left.menu
    assert some.class_of_layer[0] == menu.class_of_layer[0]
    assert some.class_of_layer[1] >= len(menu.meshes[0].rows)
    for mesh in some.meshes:
        assert all(row.batch_split == 1 for row in mesh.rows[some.class_of_layer[1]])
    floors = (
        one.boundary_floor(c, 0, 0, "hosts")
        for one, c in ((left, some.class_of_layer[1]), (problem, menu.class_of_layer[1]))
    )
    assert len(set(floors)) == 1


def test_sentences_say_what_is_lacking():
    one = Alternative(
        decision="recomputation",
        where="layers 12-17",
        chosen="full",
        instead="nothing recomputed",
        seconds=-3.1e-3,
        lacking_bytes=1.5 * 2**30,
        stage=2,
    )
    assert str(one) == (
        "recomputation of layers 12-17: full costs 3.1 ms; with nothing recomputed stage 2 exceeds "
        "memory by 1.5 GiB"
    )


def test_sentences_say_when_predictions_cannot_tell_two_plans_apart():
    one = Alternative(
        decision="schedule", where="", chosen="1f1b", instead="gpipe", seconds=1e-3, distinct=False
    )
    assert str(one).endswith("gpipe takes 1 ms more, which predictions cannot tell apart")


def test_alternatives_are_distinct_where_they_differ_by_more_than_the_model_is_off(found):
    model = calibrated_model(planned().plan.cluster)
    priced = [one for one in found.alternatives if one.seconds is not None]
    assert {one.distinct for one in priced} == {False, True}
    for one in priced:
        other = found.menu_seconds + one.seconds
        assert one.distinct == model.distinguishes(found.menu_seconds, other)


def test_a_menu_of_another_program_is_refused():
    other = lowered(width=1024, num_stages=2).menu
    with pytest.raises(PlanError, match="another program"):
        explain(planned().plan, other)
