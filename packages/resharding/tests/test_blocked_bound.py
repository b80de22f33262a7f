import pytest

from resharding import Network, cut_slices, plan
from resharding.bound import lower_bound
from resharding.slices import hosts_of


def least_rounds(task, by_host):
    """Return the fewest rounds that fill all tiles: in a round an operation brings two devices, or
    hosts, to what both know and need. Chains and gathers of 1, 2 or 4 devices take as many."""
    slices, host_of = cut_slices(task), hosts_of(task)
    devices = sorted(host_of)
    needed: dict[int, frozenset[int]] = {d: frozenset() for d in devices}
    known: dict[int, frozenset[int]] = {d: frozenset() for d in devices}
    for k, piece in enumerate(slices):
        for d in (*piece.receivers, *piece.in_place):
            needed[d] |= {k}
        for d in piece.holders:
            known[d] |= {k}

    def rounds(state, open_devices, used):
        """Yield what may be known after a round; operations that change nothing are left out."""
        acted = False
        for position, a in enumerate(open_devices):
            for b in open_devices[position + 1 :]:
                lanes = {host_of[a], host_of[b]} if by_host else {a, b}
                gained = (state[b] & needed[a]) - state[a], (state[a] & needed[b]) - state[b]
                if lanes & used or not any(gained):
                    continue
                acted = True
                after = {**state, a: state[a] | gained[0], b: state[b] | gained[1]}
                left = [d for d in open_devices if d not in (a, b)] if not by_host else devices
                yield from rounds(after, left, used | lanes)
        if not acted:
            yield state

    states, count = [known], 0
    while not any(all(needed[d] <= state[d] for d in devices) for state in states):
        count += 1
        after = {
            tuple(each[d] for d in devices) for s in states for each in rounds(s, devices, set())
        }
        best = [
            one
            for one in after
            if not any(
                one != other and all(a <= b for a, b in zip(one, other, strict=True))
                for other in after
            )
        ]
        states = [dict(zip(devices, one, strict=True)) for one in best]
    return count


@pytest.mark.parametrize("issue", ["host", "device"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (((1, 1), "R"), ((1, 4), "R")),
        (((2, 1), "S0"), ((1, 2), "R")),
        (((3, 1), "S0"), ((1, 2), "R")),
        (((4, 1), "S0"), ((2, 1), "R")),
        (((1, 4), "S1"), ((2, 1), "R")),
        (((2, 1), "S0"), ((2, 2), "S1")),
        (((2, 1), "S0"), ((2, 2), "R")),
        (((2, 2), "S1"), ((2, 2), "S0")),
        (((1, 2), "R"), ((1, 4), "S1")),
    ],
)
def test_no_order_of_small_messages_beats_the_bound(make_task, issue, source, target):
    task = make_task((12,), *source, *target)
    rounds, network = least_rounds(task, issue == "host"), Network(issue=issue, latency=1.0)
    bound = lower_bound(cut_slices(task), hosts_of(task), network)
    assert 0.6 * rounds <= bound <= rounds * (1 + 1e-6)
    assert bound <= plan(task, network).seconds


@pytest.mark.parametrize(
    ("source", "target", "rounds"),
    [
        (((3, 1), "S0"), ((3, 1), "R"), 3),  # 1, 2, and 4 of 3 slices
        (((4, 1), "S0"), ((2, 1), "R"), 3),
        (((6, 1), "S0"), ((1, 2), "R"), 4),
    ],
)
def test_what_a_device_knows_doubles_in_a_latency(make_task, source, target, rounds):
    task = make_task((12,), *source, *target)
    network = Network(nic_bandwidth=1e9, issue="device", latency=1.0)
    bound = lower_bound(cut_slices(task), hosts_of(task), network)
    assert rounds <= bound * (1 + 1e-6) and least_rounds(task, by_host=False) >= rounds


def test_two_hosts_that_a_third_feeds_take_turns(make_task):
    # 16 bytes for a device of each host, twice: of three hosts one operation runs at a time. A
    # chain of one chunk takes 16 + 16 + 2 L, two copies 2 (16 + L); halves and a ring 16 + 8 + 3 L
    task = make_task((8,), (1, 2), "S1", (2, 2), "S1")
    for latency, each in ((10.0, 52.0), (1.0, 25.0)):  # 16 + 4 + 5 with a chunk of 4 bytes
        network = Network(nic_bandwidth=1.0, issue="host", latency=latency)
        bound = lower_bound(cut_slices(task), hosts_of(task), network)
        assert bound == pytest.approx(2 * each)
        assert plan(task, network).seconds == pytest.approx(2 * each)


def test_a_device_that_blocks_takes_in_its_share_by_a_card_and_the_rest_inside(make_task):
    # 48 bytes to each of 2 devices of a host, with a card of 1 byte/s and a port of 3 each: each
    # takes 24 bytes by its card and 24 from the other, 24 + 8 s; it is 48 s by one card
    task = make_task((12,), (1, 2), "R", (1, 2), "R")
    for cards, seconds in ((2, 32.0), (1, 48.0)):
        network = Network(nic_bandwidth=1.0, device_bandwidth=3.0, num_nics=cards, issue="device")
        bound = lower_bound(cut_slices(task), hosts_of(task), network)
        assert bound == pytest.approx(seconds)
        assert bound <= plan(task, network).seconds * (1 + 1e-9)
