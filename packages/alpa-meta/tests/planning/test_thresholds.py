"""Where a re-planned pipeline changes."""

from typing import TypeAlias

import pytest
from layered_plan import CLUSTER, LAYERS, lowered

from alpa_interchange import KeptMenu, ParallelPlan
from alpa_meta.planning.replanning import changed_cluster, replan
from alpa_meta.planning.thresholds import is_used, link_thresholds, memory_thresholds
from cost_model import cluster

HERE = cluster(CLUSTER)


Made: TypeAlias = tuple[ParallelPlan, KeptMenu]


@pytest.fixture(scope="module")
def planned():
    """Return the plan and its menu."""
    made = lowered()
    return made.plan, made.menu


def test_memory_thresholds_are_the_needs_of_the_plans_above_them(planned: Made):
    found = memory_thresholds(replan(*planned))
    assert found
    for one in found:
        assert one.above is not None
        assert one.value == max(one.above.peak_bytes)
        assert len(one.above_recompute) == LAYERS
        if one.below is not None:
            assert max(one.below.peak_bytes) < one.value
            assert one.below.step_seconds >= one.above.step_seconds * (1 - 1e-3)
            assert one.below_recompute != one.above_recompute or one.below != one.above
    values = [one.value for one in found]
    assert values == sorted(values, reverse=True)


def test_with_less_memory_the_next_threshold_up_is_among_them(planned: Made):
    peak = max(replan(*planned).plan.peak_bytes)
    found = memory_thresholds(replan(*planned, memory=peak * 0.95))
    up = [one for one in found if one.value > peak * 0.95]
    assert len(up) == 1 and up[0].value <= peak * (1 + 1e-9)
    assert up[0].above is not None and up[0].below is not None
    assert up[0].above.step_seconds < up[0].below.step_seconds


def test_a_link_threshold_has_other_plans_on_its_sides(planned: Made):
    (wire,) = {group.inter_host.bandwidth for group in HERE.host_groups}
    found = list(link_thresholds(replan(*planned), "inter-host"))
    assert found
    for one in found:
        assert wire / 9 < one.value < wire * 9 and one.what == "inter-host"
        below, above = (
            replan(*planned, changed_cluster(HERE, links={"inter-host": one.value * scale}))
            for scale in (0.97, 1.03)
        )
        told = [
            (
                [(stage.layer_start, stage.mesh) for stage in side.plan.stages],
                side.plan.schedule,
                side.plan.num_microbatches,
                {row.recomputation for row in side.rows},
            )
            for side in (below, above)
        ]
        assert told[0] != told[1]


def test_thresholds_are_worth_telling(planned: Made):
    found = replan(*planned)
    for one in [*memory_thresholds(found), *link_thresholds(found, "inter-host")]:
        if one.below is None or one.above is None:
            continue
        told = [
            (
                plan.num_microbatches,
                plan.schedule,
                [stage.mesh for stage in plan.stages],
                set(recompute),
            )
            for plan, recompute in (
                (one.below, one.below_recompute),
                (one.above, one.above_recompute),
            )
        ]
        slower = one.below.step_seconds / one.above.step_seconds
        assert told[0] != told[1] or (one.what == "memory" and slower > 1)


def test_a_link_between_hosts_of_one_host_has_no_thresholds(planned: Made):
    found = replan(*planned, changed_cluster(HERE, hosts={0: 1}))
    assert not is_used(found, "inter-host") and is_used(found, "intra-host")
    assert list(link_thresholds(found, "inter-host")) == []
