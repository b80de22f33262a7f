import pytest

from resharding import Network, plan, simulate
from resharding.cases import random_pair
from resharding.drafts import Setting, deliveries_of
from resharding.network import Links
from resharding.relays import paces, shape_of, waves_of
from resharding.slices import cut_slices, hosts_of

NETWORK = Network(latency=1e-5, issue="none")


def shape(task):
    host_of = hosts_of(task)
    links = Links(NETWORK, host_of)
    setting = Setting(
        host_of=host_of,
        links=links,
        element_bytes=4.0,
        device_lanes=False,
        seed=0,
        num_restarts=0,
        node_limit=0,
    )
    return shape_of(deliveries_of(cut_slices(task), setting), links)


def test_last_parts_are_sent_to_everyone_in_place_of_being_passed_on(make_task):
    # 8 us of a card to 4 hosts: parts for each, passed on, would take 34 us. Of e in relays and d
    # in copies to everyone, 4 e + d = 8, relays are done after 8 e + 3 e and two latencies, copies
    # after 4 e + 4 d and one: 31 us if both at once
    task = make_task((2500,), (1, 1), "R", (4, 1), "R")
    made = waves_of(shape(task))
    assert made is not None
    assert [way for way, *_ in made.groups][-1] == "each" and made.seconds < 30e-6
    waves = plan(task, NETWORK, "waves")
    assert waves.seconds == pytest.approx(made.seconds, rel=0.06)


@pytest.mark.parametrize("seed", [4, 22, 41, 115, 394, 499, 556, 883])
@pytest.mark.parametrize("strategy", ["waves", "paced_waves"])
def test_waves_do_the_task_above_the_bound(seed, strategy):
    task = random_pair(seed)
    made = plan(task, NETWORK, strategy)
    assert simulate(task, made.transfers, NETWORK).seconds == pytest.approx(made.seconds)
    assert made.seconds >= made.lower_bound


def test_paced_relays_beat_those_that_start_at_once_where_a_source_takes_latencies(make_task):
    # 67 KB take 54 us on a card
    task = make_task((34, 500), (1, 1), "R R", (3, 2), "R R")
    assert paces(shape(task))
    waves, paced, best = (plan(task, NETWORK, each) for each in ("waves", "paced_waves", "auto"))
    assert paced.seconds < waves.seconds
    assert best.seconds < 1.25 * best.lower_bound
