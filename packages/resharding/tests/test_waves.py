import pytest

from resharding import Network, plan
from resharding.cases import random_pair
from resharding.drafts import Setting, deliveries_of
from resharding.network import Links
from resharding.slices import cut_slices, hosts_of
from resharding.waves import num_transfers, shape_of, waves_of

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


def test_chains_carry_what_takes_latencies_and_others_what_is_last(make_task):
    # D = 83 us of a card to 3 hosts, L = 10 us: chains alone end at D + 3 L and two parts. 2 L / 3
    # go to each host by a copy of its own while the last parts of chains are under way, so that
    # D + 2 x 2 L / 3 are sent by T - L: 106 us were parts of no size
    task = make_task((25872,), (1, 1), "R", (3, 1), "R")
    made = waves_of(shape(task))
    assert made is not None
    assert made.groups[0][0] == "chain" and made.groups[-1][0] == "each"
    assert made.seconds < 110e-6
    waves = plan(task, NETWORK, "waves")
    assert waves.seconds == pytest.approx(made.seconds, rel=0.02)
    assert waves.seconds < 0.95 * plan(task, NETWORK, "parallel_chains").seconds


@pytest.mark.parametrize(
    ("size", "source", "spec", "target"),
    [
        (5768, (1, 1), "R", (3, 1)),  # relays have two thirds of a card while the holder sends
        (7371, (1, 1), "R", (4, 1)),
        (19174, (2, 1), "S0", (4, 4)),  # relays are three in four of what enters a host
        (12880, (3, 2), "S0", (4, 8)),
        (2500, (2, 1), "S0", (3, 1)),
    ],
)
def test_waves_take_what_is_expected(size, source, spec, target, make_task):
    task = make_task((size,), source, spec, target, "R")
    made = waves_of(shape(task))
    assert made is not None
    assert plan(task, NETWORK, "waves").seconds == pytest.approx(made.seconds, rel=0.08)


@pytest.mark.parametrize("seed", [22, 118, 279, 499, 625, 673])
def test_waves_are_within_the_transfers_of_a_draft(seed):
    task = random_pair(seed)
    assert len(plan(task, NETWORK, "waves").transfers) <= 256
    few, many = waves_of(shape(task), 256), waves_of(shape(task), 512)
    assert few is not None and many is not None and many.seconds <= few.seconds * 1.002


def test_what_is_passed_on_inside_at_once_is_few_transfers(make_task):
    # 31 us of a card are 1.6 inside, so that 3 copies of all take less than half a latency
    few = shape(make_task((9600,), (1, 1), "R", (3, 4), "R"))
    many = shape(make_task((96000,), (1, 1), "R", (3, 4), "R"))
    ways = (("inside", 1),) * 8
    assert few.batched and not many.batched
    assert num_transfers(few, ways) == 3 * (8 * 3 + 2 * 3)  # hosts, parts, two batches
    assert num_transfers(many, ways) == 3 * (8 * 3 + 8 * 3)
