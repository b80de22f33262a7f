import math

import pytest

from alpa_interchange.reshard import Transfer
from resharding import Network, simulate
from resharding.course import demand_of
from resharding.dispatch import dispatched
from resharding.network import Links
from resharding.slices import hosts_of


def copies(*moves):
    return tuple(
        Transfer(method="copy", start=(a,), stop=(b,), sender=sender, receivers=(receiver,))
        for a, b, sender, receiver in moves
    )


@pytest.fixture
def crossing(make_task):
    """Two devices with a slice for each of two others, in an order that has one wait for all."""
    task = make_task((8,), (2, 1), "S0", (2, 1), "R", dtype="int8")
    transfers = copies((0, 4, 0, 200), (0, 4, 0, 300), (4, 8, 100, 300), (4, 8, 100, 200))
    return task, transfers


@pytest.mark.parametrize("issue", ["host", "device"])
def test_crossing_copies_take_two_rounds_in_place_of_four(crossing, issue):
    task, transfers = crossing
    network = Network(nic_bandwidth=4.0, device_bandwidth=4.0, latency=1.0, issue=issue)
    links = Links(network, hosts_of(task))
    demands = [demand_of(each, 1.0, links, transfers) for each in transfers]
    assert simulate(task, transfers, network).seconds == pytest.approx(8.0)
    order, seconds = dispatched(transfers, demands, links)
    assert seconds == pytest.approx(4.0)
    assert simulate(task, order, network).seconds == pytest.approx(seconds)
    assert dispatched(transfers, demands, links, limit=3.0)[1] == math.inf


def test_a_row_of_transfers_starts_before_what_nothing_waits_for(make_task):
    task = make_task((8,), (1, 1), "R", (3, 1), "R", dtype="int8")
    network = Network(nic_bandwidth=8.0, device_bandwidth=8.0, latency=1.0, issue="device")
    links = Links(network, hosts_of(task))
    alone, first = copies((0, 8, 0, 300), (0, 8, 0, 100))
    (second,) = copies((0, 8, 100, 200))
    relay = Transfer(
        method="copy",
        start=second.start,
        stop=second.stop,
        sender=100,
        receivers=(200,),
        after=(1,),
    )
    transfers = (alone, first, relay)
    demands = [demand_of(each, 1.0, links, transfers) for each in transfers]
    order, seconds = dispatched(transfers, demands, links)
    assert order[0] == first and seconds == pytest.approx(4.0)


def test_local_transfers_start_whoever_is_busy(make_task):
    task = make_task((8,), (1, 1), "R", (2, 1), "R", first_host=0, dtype="int8")
    network = Network(nic_bandwidth=8.0, device_bandwidth=8.0, latency=1.0, issue="device")
    links = Links(network, hosts_of(task))
    here = Transfer(method="local", start=(0,), stop=(8,), sender=0, receivers=(0,))
    transfers = (*copies((0, 8, 0, 100)), here)
    demands = [demand_of(each, 1.0, links, transfers) for each in transfers]
    order, seconds = dispatched(transfers, demands, links)
    assert len(order) == 2 and seconds == pytest.approx(2.0)


def test_devices_do_not_share_a_card_while_another_is_free(make_task):
    # two devices of hosts 0 and 1 have a byte for each device of hosts 2 and 3, and no latency. By
    # number 0 and 1 would send at once, by one card
    task = make_task((8,), (2, 2), "S01", (2, 2), "R", dtype="int8")
    network = Network(nic_bandwidth=1.0, device_bandwidth=9.0, latency=1.0, issue="device")
    links = Links(network, hosts_of(task))
    transfers = copies((0, 2, 0, 200), (2, 4, 1, 300), (4, 6, 100, 200), (6, 8, 101, 300))
    demands = [demand_of(each, 1.0, links, transfers) for each in transfers]
    order, seconds = dispatched(transfers, demands, links)
    assert {each.sender // 100 for each in order[:2]} == {0, 1}
    assert seconds == pytest.approx(6.0)
    others = {dispatched(transfers, demands, links, shake=number)[0] for number in range(1, 9)}
    assert len(others) > 1
