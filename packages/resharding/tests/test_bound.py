import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange.reshard import PlacedTensor, ReshardingTask
from alpa_interchange.tensor import ShardingSpec, TensorType
from resharding import HostLinks, Network, PlanOptions, plan
from resharding.bound import receive_seconds
from resharding.cases import paper_cases, random_task
from resharding.minimum_cut import send_seconds
from resharding.strategies import STRATEGIES
from resharding.tiles import TILES

groups = st.dictionaries(
    st.frozensets(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 100), max_size=7
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(groups)
def test_send_seconds_is_the_maximum_quotient_over_all_sender_sets(outgoing):
    senders = sorted({sender for group in outgoing for sender in group})
    best = 0.0
    for size in range(1, len(senders) + 1):
        for chosen in itertools.combinations(senders, size):
            inside = sum(load for group, load in outgoing.items() if group <= set(chosen))
            best = max(best, inside / size)
    assert send_seconds(outgoing, dict.fromkeys(range(6), 2.0)) == pytest.approx(best / 2, rel=1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(groups, st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_unequal_senders_share_by_their_rates_and_whole_elements_take_longer(outgoing, rates):
    rate = dict(enumerate(map(float, rates)))
    senders = sorted({sender for group in outgoing for sender in group})
    best = 0.0
    for size in range(1, len(senders) + 1):
        for chosen in itertools.combinations(senders, size):
            inside = sum(load for group, load in outgoing.items() if group <= set(chosen))
            best = max(best, inside / sum(rate[sender] for sender in chosen))
    parts = send_seconds(outgoing, rate)
    assert parts == pytest.approx(best, rel=1e-9)
    whole = send_seconds(outgoing, rate, 1.0)
    assert parts * (1 - 1e-9) <= whole <= parts + 1.0


def test_three_elements_of_one_byte_leave_two_senders_in_two_seconds():
    assert send_seconds({frozenset({0, 1}): 3.0}, {0: 1.0, 1: 1.0}) == 1.5
    assert send_seconds({frozenset({0, 1}): 3.0}, {0: 1.0, 1: 1.0}, 1.0) == 2.0


def test_receive_seconds_is_the_busiest_receiver():
    assert receive_seconds({1: 10.0, 2: 30.0}, {1: 5.0, 2: 5.0}) == 6.0
    assert receive_seconds({}, {}) == 0.0


@pytest.mark.parametrize("issue", ["host", "device", "none"])
def test_no_simulated_plan_beats_the_bound(issue):
    network = Network(nic_bandwidth=1e3, device_bandwidth=2e4, issue=issue, latency=1e-4)
    for seed in range(40):
        made = plan(random_task(seed, overlap=seed % 2 == 0, longest=20), network)
        assert made.seconds >= made.lower_bound * (1 - 1e-9)


@pytest.mark.parametrize("seed", [818, 893])
@pytest.mark.parametrize("strategy", TILES)
def test_rings_of_unequal_pieces_carry_what_the_least_owner_takes_in(seed, strategy):
    for overlap in (False, True):
        made = plan(random_task(seed, overlap=overlap), Network(), strategy)
        assert made.seconds >= made.lower_bound * (1 - 1e-9)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from(list(STRATEGIES)),
    st.sampled_from(["host", "device", "none"]),
    st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_no_strategy_beats_the_bound(seed, overlap, strategy, issue, latency):
    hosts = (HostLinks(host=1, nic_bandwidth=3e3), HostLinks(host=4, num_nics=2))
    network = Network(
        nic_bandwidth=1e3, device_bandwidth=2e3, hosts=hosts, issue=issue, latency=latency
    )
    task = random_task(seed, overlap=overlap, longest=12)
    made = plan(task, network, strategy, PlanOptions(num_restarts=0, node_limit=0))
    assert made.seconds >= made.lower_bound * (1 - 1e-9)


def test_the_bound_of_one_tensor_to_many_hosts_is_one_card_time():
    made = plan(paper_cases()["1 to 4x2"])
    assert made.lower_bound == pytest.approx(2**30 / 1.25e9)


def test_what_only_one_device_holds_or_wants_passes_through_its_card():
    def side(first, count, spec):
        return PlacedTensor(
            spec=ShardingSpec((spec,)),
            axis_names=("device",),
            mesh_shape=(count,),
            devices=tuple(range(first, first + count)),
            hosts=(first,) * count,
        )

    # tiles of 2 and 1 of 3 elements on two devices of a host, each with a card of 1 byte/s
    network = Network(
        nic_bandwidth=1.0,
        device_bandwidth=100.0,
        num_nics=2,
        hosts=(HostLinks(host=2, nic_bandwidth=2.0),),
        issue="none",
    )
    cut, whole, tensor = side(0, 2, ("device",)), side(2, 1, ()), TensorType((3,), "int8")
    for source, target in ((cut, whole), (whole, cut)):
        made = plan(ReshardingTask(tensor=tensor, source=source, target=target), network)
        assert made.lower_bound == 2.0
        assert made.seconds == pytest.approx(2.0)
