import itertools

import pytest

from resharding import Network, check_plan, plan, simulate
from resharding.cases import random_pair, random_task
from resharding.relays import paced_of
from resharding.slices import hosts_of
from resharding.waves import MOST_TRANSFERS, Shape

NETWORK = Network(latency=1e-5, issue="none")


@pytest.mark.parametrize("seed", [4, 22, 41, 115, 279, 394, 499, 556, 625, 673, 883])
@pytest.mark.parametrize("strategy", ["waves", "paced_waves"])
def test_waves_do_the_task_above_the_bound(seed, strategy):
    task = random_pair(seed)
    made = plan(task, NETWORK, strategy)
    assert simulate(task, made.transfers, NETWORK).seconds == pytest.approx(made.seconds)
    assert made.seconds >= made.lower_bound


@pytest.mark.parametrize("strategy", ["waves", "paced_waves"])
@pytest.mark.parametrize("latency", [1e-3, 1.0])
def test_all_groups_are_passed_on_where_the_last_one_is_of_no_index(strategy, latency):
    network = Network(nic_bandwidth=1e3, device_bandwidth=2e3, issue="none", latency=latency)
    for seed in range(150):
        task = random_task(seed, overlap=seed % 2 == 0, longest=12)
        made = plan(task, network, strategy)
        check_plan(made)
        assert made.seconds >= made.lower_bound * (1 - 1e-9)


def shape(seconds):
    return Shape(
        seconds=seconds,
        latency=1e-5,
        num_sources=1,
        num_hosts=3,
        per_host=2,
        num_slices=1,
        num_copies=3,
        inner=0.05,
        indices=1000,
    )


def test_paced_groups_are_as_many_as_transfers_last_for():
    # a group is 3 copies and 6 relays, and 3 hosts get what is last, and pass on what they have
    few, many = (paced_of(shape(54e-6), most) for most in (64, MOST_TRANSFERS))
    assert few is not None and many is not None and few.count < many.count
    assert few.seconds > many.seconds > 54e-6 + 2e-5
    assert paced_of(shape(54e-6), 20) is None


def test_paced_relays_are_a_step_above_the_bound():
    # 29 KB take 23.6 us of a card, and 4 hosts no less than 23.6 + 20 - 10 / 4 = 41.1; an eighth or
    # less of the 23.6 is what relays are behind. Those that start at once share the card
    task = random_pair(22)
    made, fair = (plan(task, NETWORK, each) for each in ("auto", "waves"))
    assert made.strategy == "paced_waves" and made.lower_bound == pytest.approx(41.1e-6, rel=1e-2)
    assert made.seconds < made.lower_bound + 23.6e-6 / 8 < 0.95 * fair.seconds


def test_every_pair_of_hosts_has_one_copy_under_way_at_a_time():
    task = random_pair(22)
    made = plan(task, NETWORK, "paced_waves")
    course = simulate(task, made.transfers, NETWORK).intervals
    host_of = hosts_of(task)
    ways: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for each, (start, stop) in zip(made.transfers, course, strict=True):
        way = host_of[each.sender], host_of[each.receivers[0]]
        ways.setdefault(way, []).append((start, stop - NETWORK.latency))
    assert len(ways) == 4 + 4 * 3
    for copies in ways.values():
        for (_, left), (start, _) in itertools.pairwise(sorted(copies)):
            assert start >= left - 1e-12
