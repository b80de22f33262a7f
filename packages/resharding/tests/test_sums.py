import numpy as np
import pytest
from attrs import evolve
from summands import random_sum, summands, task_of

from resharding import HostExecutor, Network, PlanError, check_plan, plan, simulate
from resharding.notation import parse_placed
from resharding.routes import part_of
from resharding.slices import all_tiles


@pytest.mark.sample("issue", "latency")
@pytest.mark.parametrize("latency", [0.0, 1e-5])
@pytest.mark.parametrize("issue", ["host", "device", "none"])
def test_targets_get_the_sum_of_all_summands(issue, latency):
    network, count = Network(issue=issue, latency=latency), 0
    for seed in range(80):
        task = random_sum(seed)
        if task is None:
            continue
        count += 1
        made = plan(task, network)
        check_plan(made)
        found = simulate(task, made.transfers, network)
        assert made.seconds == pytest.approx(found.seconds, rel=1e-9)
        assert made.lower_bound <= made.seconds * (1 + 1e-9)
        shards, total = summands(task)
        results = HostExecutor(made).run(shards)
        for device, tile in all_tiles(task.target, task.tensor.shape).items():
            expected = total[tile.within((0,) * len(tile.start))]
            np.testing.assert_array_equal(results[device], expected)
    assert count > 20


def test_every_device_of_a_large_sum_sends_its_share_of_the_others():
    """Four devices of a host send 3/4 of 64 MB each, at 25 GB/s: 1.92 ms; 64 MB over a card of
    1.25 GB/s take 51.2 ms."""
    task = task_of((16_000_000,), "1x4:R+device", "1x1:R")
    made = plan(task, Network(issue="none"))
    sums = [each for each in made.transfers if each.method == "reduce"]
    assert len(sums) == 4 and len({each.receivers[-1] for each in sums}) == 4
    assert {each.stop[0] - each.start[0] for each in sums} == {4_000_000}
    assert made.seconds == pytest.approx(0.0512 + 0.00192, rel=0.01)
    assert made.lower_bound == pytest.approx(0.0512, rel=1e-6)


def test_a_small_sum_is_made_on_one_device():
    task = task_of((8,), "1x4:R+device", "1x1:R")
    made = plan(task, Network(issue="host", latency=1e-5))
    assert [each.method for each in made.transfers] == ["reduce", "copy"]


def test_an_axis_of_one_device_holds_the_sum():
    task = task_of((8, 8), "2x1:S0,R+device", "1x2:R,S1")
    made = plan(task)
    assert all(each.method != "reduce" for each in made.transfers)
    check_plan(made)


def test_a_chain_that_leaves_a_summand_out_is_refused():
    task = task_of((8,), "1x4:R+device", "1x1:R")
    made = plan(task, Network(latency=1e-5))
    first, *rest = made.transfers
    short = evolve(first, receivers=first.receivers[1:])
    with pytest.raises(PlanError, match="which are not all that hold its summands, each once"):
        check_plan(evolve(made, transfers=(short, *rest)))
    with pytest.raises(PlanError, match="does not hold all of it when it starts"):
        check_plan(evolve(made, transfers=tuple(evolve(one, after=()) for one in rest)))


def test_what_only_moves_bytes_refuses_summands_and_targets_are_reduced():
    task = task_of((8,), "1x4:R+device", "1x1:R")
    owners = dict.fromkeys((*task.source.devices, *task.target.devices), "a")
    with pytest.raises(ValueError, match=r"unreduced sum over the mesh axes \('device',\)"):
        part_of("a", plan(task), owners)
    with pytest.raises(ValueError, match="the target layout is an unreduced sum"):
        plan(task_of((8,), "1x4:R", "1x2:R+device"))
    with pytest.raises(ValueError, match=r"unreduced over \+host or \+device, got \['x'\]"):
        parse_placed("1x4:R+x")
