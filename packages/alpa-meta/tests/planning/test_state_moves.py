"""What of the state moves from one plan to another."""

import pytest
from attrs import evolve
from layered_plan import CLUSTER, WIDTH, lowered

from alpa_interchange import ShardingSpec
from alpa_meta.errors import PlanError
from alpa_meta.planning.replanning import changed_cluster, replan
from alpa_meta.planning.state_moves import by_kind, state_moves
from cost_model import cluster

PLANNED = lowered(num_stages=2)
PLAN, MENU = PLANNED.plan, PLANNED.menu
HERE = cluster(CLUSTER)
MATRIX = 4 * WIDTH * WIDTH * 4  # bytes
ONE_HOST = changed_cluster(HERE, hosts={0: 1})


def test_nothing_moves_where_the_plan_stays():
    assert state_moves(PLAN, MENU, replan(PLAN, MENU)).moves == ()


def test_what_the_second_host_held_goes_to_the_first():
    found = replan(PLAN, evolve(MENU, num_stages=1), ONE_HOST)
    moves = state_moves(PLAN, MENU, found)
    crossing = [one for one in moves.moves if one.bytes_between_hosts]
    # two layers of two matrices and their momentum were on devices 8 to 15
    assert len(crossing) == 8
    assert {one.path.split("]")[1] for one in crossing} == {"[2", "[3"}
    assert all(min(one.source) >= 8 > max(one.target) for one in crossing)
    assert all(one.bytes_between_hosts == MATRIX for one in crossing)
    total = by_kind(moves)["between hosts"]
    assert total == 8 * MATRIX
    group = HERE.host_groups[0]
    card = group.num_nics * group.inter_host.effective_bandwidth
    assert moves.least_seconds == pytest.approx(total / card)
    assert moves.seconds >= moves.least_seconds


def test_what_the_busiest_device_receives_over_both_links_bounds_the_seconds_of_fast_cards():
    fast = changed_cluster(ONE_HOST, links={"inter-host": 1e15})
    found = replan(PLAN, evolve(MENU, num_stages=1), fast)
    whole = evolve(MENU, specs=(ShardingSpec.replicated(2),) * len(MENU.specs))
    moves = state_moves(PLAN, whole, found)
    # Layers 2 and 3 cross once, and go from there to the 7 others; of layers 0 and 1 each of the 8
    # devices has an eighth. So each receives 8 matrices and 7/8 of 8 others.
    assert by_kind(moves) == {
        "within hosts": (8 * 7 + 8 * 7) * MATRIX,
        "between hosts": 8 * MATRIX,
    }
    device = HERE.host_groups[0].intra_host.effective_bandwidth
    assert moves.least_seconds == pytest.approx(15 * MATRIX / device)


def test_an_array_in_pieces_moves_by_its_layers():
    found = replan(PLAN, evolve(MENU, num_stages=1), ONE_HOST)
    leaf = next(one for one in MENU.leaves if one.layer == 2)
    stacked = (4, *leaf.shape)
    # the same array as layers 2 and 3 of a stack of four, cut in two on the second stage's mesh
    menu = evolve(
        MENU,
        leaves=tuple(
            evolve(one, path="stack", shape=(1, *one.shape), start=one.layer, stop=one.layer + 1)
            if one.path.endswith(leaf.path[-8:]) and one.path.startswith("state[0]")
            else one
            for one in MENU.leaves
        ),
        specs=tuple(ShardingSpec(((), *spec.dims)) for spec in MENU.specs),
    )
    assert stacked[0] == len([one for one in menu.leaves if one.path == "stack"])
    second = PLAN.shardings[1]
    axis = second.mesh.logical.axis_names[0]
    whole = ShardingSpec(((), (axis,), ()))
    shardings = (
        evolve(PLAN.shardings[0], state_specs={"stack[0:2]": whole}),
        evolve(second, state_specs={"stack[2:4]": whole}),
    )
    inputs = tuple(
        evolve(PLAN.program.inputs[0], path=path, shape=(2, *leaf.shape))
        for path in ("stack[0:2]", "stack[2:4]")
    )
    plan = evolve(PLAN, shardings=shardings, program=evolve(PLAN.program, inputs=inputs))
    moves = state_moves(plan, menu, found)
    crossing = [one for one in moves.moves if one.bytes_between_hosts]
    assert [(one.path, one.start, one.stop) for one in crossing] == [
        ("stack", 2, 3),
        ("stack", 3, 4),
    ]
    assert all(one.bytes_between_hosts == MATRIX for one in crossing)


def test_without_the_specs_of_its_state_a_menu_is_refused():
    found = replan(PLAN, MENU, ONE_HOST)
    with pytest.raises(PlanError, match="how the state lies"):
        state_moves(PLAN, evolve(MENU, leaves=()), found)
