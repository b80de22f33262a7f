import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange.reshard import Transfer
from resharding import Network, PlanError, check_plan, plan, simulate
from resharding.cases import paper_cases, random_task

NETWORK = Network(nic_bandwidth=1.25e9, device_bandwidth=25e9, chunk_bytes=131072)


def copy(start, stop, sender, receiver, after=()):
    return Transfer(
        method="copy", start=start, stop=stop, sender=sender, receivers=(receiver,), after=after
    )


@pytest.mark.parametrize(("num_hosts", "per_host"), [(1, 2), (1, 4), (2, 2), (3, 2), (4, 2)])
def test_strategies_take_the_closed_form_times_of_one_sender(num_hosts, per_host):
    # D bytes to A hosts x B devices, t = D / card (reference: arXiv 2211.05322, section 3)
    task = paper_cases()[f"1 to {num_hosts}x{per_host}"]
    size, a, b = 2.0**30, num_hosts, per_host
    t, inside = size / 1.25e9, size / 25e9
    seconds = {
        name: plan(task, NETWORK, name).seconds
        for name in ("send_recv", "local_all_gather", "global_all_gather", "broadcast")
    }
    assert seconds["send_recv"] == pytest.approx(a * b * t)
    ring = (b - 1) / b * inside
    # the gather inside a host overlaps the next host's scatter, but for the last host
    assert seconds["local_all_gather"] == pytest.approx(a * t + ring)
    last = t * (a * b - 1) / (a * b) if a > 1 else ring
    assert seconds["global_all_gather"] == pytest.approx(t + last)
    chunks = plan(task, NETWORK, "broadcast").transfers[0].num_chunks
    card, port = size / chunks / 1.25e9, size / chunks / 25e9
    fill = a * card + a * (b - 1) * port - card
    assert seconds["broadcast"] == pytest.approx(t + fill)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 30))
def test_the_fill_law_of_a_chain_equals_sending_chunk_by_chunk(new_host, chunks):
    hosts, devices = [0], [0]
    for k, jump in enumerate(new_host):
        hosts.append(hosts[-1] + jump)
        devices.append(100 * hosts[-1] + k + 1)
    task = _chain_task(devices, hosts)
    chain = Transfer(
        method="broadcast",
        start=(0,),
        stop=(6000,),
        sender=devices[0],
        receivers=tuple(devices[1:]),
        num_chunks=chunks,
    )
    network = Network(nic_bandwidth=100.0, device_bandwidth=700.0)
    rates = [100.0 if a != b else 700.0 for a, b in zip(hosts, hosts[1:], strict=False)]
    done = [0.0] * len(rates)  # when each hop has passed on the chunk before
    for _ in range(chunks):
        ready = 0.0
        for hop, rate in enumerate(rates):
            done[hop] = max(done[hop], ready) + 6000 / chunks / rate
            ready = done[hop]
    assert simulate(task, (chain,), network).seconds == pytest.approx(done[-1])


def _chain_task(devices, hosts):
    from alpa_interchange.reshard import PlacedTensor, ReshardingTask
    from alpa_interchange.tensor import ShardingSpec, TensorType

    def placed(chosen, on):
        return PlacedTensor(
            spec=ShardingSpec(((),)),
            axis_names=("x",),
            mesh_shape=(len(chosen),),
            devices=tuple(chosen),
            hosts=tuple(on),
        )

    return ReshardingTask(
        tensor=TensorType((6000,), "int8"),
        source=placed(devices[:1], hosts[:1]),
        target=placed(devices[1:], hosts[1:]),
    )


def test_two_flows_share_a_card_fairly_and_both_directions_are_free(make_task):
    # two devices of one host send 4 bytes each to two hosts: the card carries 8 bytes
    task = make_task((8,), (1, 2), "S1", (2, 1), "S0", dtype="int8")
    network = Network(nic_bandwidth=1.0, device_bandwidth=100.0, issue="none")
    transfers = (copy((0,), (4,), 0, 100), copy((4,), (8,), 1, 200))
    result = simulate(task, transfers, network)
    assert result.seconds == pytest.approx(8.0)
    assert result.bytes_out == {0: 8.0} and result.bytes_in == {1: 4.0, 2: 4.0}


def test_blocking_hosts_wait_in_plan_order_and_asynchronous_ones_do_not(make_task):
    task = make_task((8,), (2, 1), "S0", (2, 1), "S0", first_host=2, dtype="int8")
    crossed = make_task((8,), (2, 1), "S0", (2, 1), "R", first_host=2, dtype="int8")
    parallel = (copy((0,), (4,), 0, 200), copy((4,), (8,), 100, 300))
    network = Network(nic_bandwidth=1.0, device_bandwidth=100.0)
    assert simulate(task, parallel, network).seconds == pytest.approx(4.0)
    blocked = (*parallel[:1], copy((0,), (4,), 0, 300), copy((4,), (8,), 100, 200), parallel[1])
    assert simulate(crossed, blocked, network).seconds == pytest.approx(12.0)
    free = Network(nic_bandwidth=1.0, device_bandwidth=100.0, issue="none")
    assert simulate(crossed, blocked, free).seconds == pytest.approx(8.0)


def test_a_plan_that_forgets_a_slice_is_rejected():
    made = plan(paper_cases()["case 3"])
    with pytest.raises(PlanError, match="lacks a part of its tile"):
        simulate(made.task, made.transfers[:-1], NETWORK)
    with pytest.raises(PlanError, match="lacks a part of its tile"):
        check_plan(evolve(made, transfers=made.transfers[1:]))


def test_a_plan_that_sends_what_it_does_not_have_is_rejected():
    made = plan(paper_cases()["case 3"])
    first = made.transfers[0]
    liar = evolve(first, sender=next(d for d in made.task.source.devices if d != first.sender))
    stranger = evolve(first, sender=0 if first.sender >= 100 else 100)
    for wrong in {liar.sender: liar, stranger.sender: stranger}.values():
        if wrong.sender // 100 == first.sender // 100:
            continue
        with pytest.raises(PlanError, match="does not hold all of it when it starts"):
            simulate(made.task, (wrong, *made.transfers[1:]), NETWORK)


def test_relaying_before_the_bytes_arrived_is_rejected(make_task):
    task = make_task((8,), (1, 1), "R", (1, 2), "R", dtype="int8")
    relay = copy((0,), (8,), 100, 101)
    with pytest.raises(PlanError, match="device 100, which does not hold"):
        simulate(task, (relay, copy((0,), (8,), 0, 100)), Network(issue="none"))
    good = (copy((0,), (8,), 0, 100), evolve(relay, after=(0,)))
    assert simulate(task, good, Network(issue="none")).seconds > 0


def test_what_belongs_to_no_tile_of_a_receiver_is_rejected(make_task):
    # a source device that collected all would send it to the target in one message
    task = make_task((8,), (1, 2), "S1", (1, 1), "R", dtype="int8")
    collected = (copy((4,), (8,), 1, 0), copy((0,), (8,), 0, 100, after=(0,)))
    with pytest.raises(PlanError, match=r"brings \(4,\)\.\.\(8,\) to device 0, which has no tile"):
        simulate(task, collected, Network(issue="none"))


def test_what_only_goes_first_from_a_host_costs_what_follows_no_latency(make_task):
    # 4 bytes each over a card of 1 byte/s; 10 s to arrive
    network = Network(nic_bandwidth=1.0, device_bandwidth=100.0, latency=10.0, issue="none")
    task = make_task((8,), (1, 2), "R", (2, 1), "S0", first_host=1, dtype="int8")
    first = copy((0,), (4,), 0, 100)
    behind = (first, copy((4,), (8,), 0, 200, after=(0,)))
    assert simulate(task, behind, network).intervals == ((0.0, 14.0), (4.0, 18.0))
    beside = (first, copy((4,), (8,), 1, 200, after=(0,)))  # another device of the host
    assert simulate(task, beside, network).intervals == ((0.0, 14.0), (4.0, 18.0))


def test_whoever_passes_on_or_is_another_host_waits_for_bytes_to_arrive(make_task):
    network = Network(nic_bandwidth=1.0, device_bandwidth=100.0, latency=10.0, issue="none")
    task = make_task((4,), (1, 1), "R", (2, 1), "R", first_host=1, dtype="int8")
    relayed = (copy((0,), (4,), 0, 100), copy((0,), (4,), 100, 200, after=(0,)))
    assert simulate(task, relayed, network).intervals == ((0.0, 14.0), (14.0, 28.0))
    task = make_task((4,), (2, 1), "R", (1, 1), "R", first_host=2, dtype="int8")
    others = (copy((0,), (2,), 0, 200), copy((2,), (4,), 100, 200, after=(0,)))
    assert simulate(task, others, network).intervals == ((0.0, 12.0), (12.0, 24.0))


def test_transfers_that_wait_for_each_other_are_rejected(make_task):
    task = make_task((8,), (1, 1), "R", (1, 1), "R", dtype="int8")
    with pytest.raises(PlanError, match="never start"):
        simulate(task, (copy((0,), (8,), 0, 100, after=(0,)),), NETWORK)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(["host", "device", "none"]))
def test_no_card_carries_more_than_its_rate_for_the_time_taken(seed, issue):
    network = Network(nic_bandwidth=1e3, device_bandwidth=5e3, issue=issue)
    made = plan(random_task(seed, overlap=True, longest=16), network)
    result = simulate(made.task, made.transfers, network)
    assert result.seconds == pytest.approx(made.seconds)
    for carried in (result.bytes_in, result.bytes_out):
        for amount in carried.values():
            assert amount <= network.nic_bandwidth * result.seconds * (1 + 1e-9)
    for begin, end in result.intervals:
        assert 0 <= begin <= end <= result.seconds
