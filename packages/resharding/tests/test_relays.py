import pytest

from resharding import Network, check_plan, plan, simulate
from resharding.cases import random_pair, random_task
from resharding.relays import paces
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


def test_relays_are_paced_where_a_source_takes_latencies():
    assert paces(shape(54e-6), MOST_TRANSFERS) and not paces(shape(8e-6), MOST_TRANSFERS)
    assert not paces(shape(54e-6), 24)  # a group is 3 copies, and 6 relays


def test_paced_relays_beat_those_that_start_at_once_where_sizes_are_coarse():
    # 91 x 81 elements, 24 us of a card: smaller parts than a row arrive together
    waves, paced = (plan(random_pair(22), NETWORK, each) for each in ("waves", "paced_waves"))
    assert paced.seconds < 0.98 * waves.seconds
