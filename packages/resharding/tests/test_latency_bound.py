import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resharding import Network, plan, simulate
from resharding.latency_bound import late_seconds, spread_seconds

amounts = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 20)), min_size=1, max_size=4)


def test_what_a_card_takes_in_last_goes_to_every_device():
    # 100 bytes for 4 devices at 10 bytes/s: in the last 2 s of sending 5 of them, the others before
    # in 9.5 s, and 2 s to arrive
    assert late_seconds([(4, 100.0)], 10.0, 2.0, doubles=False) == pytest.approx(9.5 + 2 + 2)
    # so few that none is worth passing on: 4 x 1 byte
    assert late_seconds([(4, 1.0)], 10.0, 2.0, doubles=False) == pytest.approx(0.4 + 2)
    # holders double: 5 bytes, before them 10 for two each, before them 85 once
    assert late_seconds([(4, 100.0)], 10.0, 2.0, doubles=True) == pytest.approx(8.5 + 2 + 2 + 2)


def test_receivers_help_to_send_from_one_latency_on():
    # 40 bytes for one device each: the holder sends 10/s from 0 s, receivers 10/s from 1 s, so
    # 10 s + 10 (s - 1) = 40 after s = 2.5 s, and a latency to arrive
    assert spread_seconds([(1, 40.0)], (10.0, 10.0, 99.0), 1.0, doubles=False) == pytest.approx(
        3.5, 2e-3
    )


def windows(items, rate, latency, reach, choice):
    """Return the seconds when item k is sent in window choice[k], were windows of any length."""
    sends: dict[int, float] = {}
    for (count, amount), window in zip(items, choice, strict=True):
        sends[window] = sends.get(window, 0.0) + amount * max(1.0, count / reach(window))
    return sends


@settings(max_examples=200, deadline=None, derandomize=True)
@given(amounts, st.sampled_from([1.0, 3.0, 10.0]), st.booleans(), st.data())
def test_no_choice_of_windows_is_earlier(items, latency, doubles, data):
    """Items that fit into windows of one latency, counted from the end, take as long at least."""

    def reach(window):
        return 2.0**window if doubles else (1.0 if window == 0 else 1e9)

    choice = [data.draw(st.integers(0, 5)) for _ in items]
    sends = windows(items, 1.0, latency, reach, choice)
    last = max(sends)
    fits = all(amount <= latency for window, amount in sends.items() if window < last)
    if not fits:
        return
    seconds = latency + last * latency + sends[last]
    assert late_seconds(sorted(items), 1.0, latency, doubles) <= seconds * (1 + 1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(amounts, st.integers(0, 5), st.booleans())
def test_more_senders_never_take_longer(items, others, doubles):
    pairs = sorted(items)
    alone = spread_seconds(pairs, (2.0, 0.0, 2.0), 1.0, doubles)
    assert alone == pytest.approx(late_seconds(pairs, 2.0, 1.0, doubles), rel=2e-3)
    assert spread_seconds(pairs, (2.0, float(others), 2.0 + others), 1.0, doubles) <= alone * (
        1 + 2e-3
    )


def test_small_tensors_take_a_few_latencies_to_many_devices(make_task):
    # 2 KB to 3 hosts x 8 devices: a card takes 1.6 us for a copy, so 24 of them 40 us, but 3 and
    # one more latency inside 25 us; a chain through 24 devices would take 240
    task = make_task((512,), (1, 1), "R", (3, 8), "R", dtype="float32")
    network = Network(latency=1e-5, issue="none")
    star, best = plan(task, network, "star"), plan(task, network)
    assert best.seconds <= star.seconds < 27e-6
    assert best.seconds < 1.1 * best.lower_bound


def test_a_tensor_of_some_latencies_goes_in_chains_side_by_side(make_task):
    # 1 MB takes 839 us on a card: one chain of 4 hosts adds 250 us, chains side by side 110, and
    # copies of the last parts in place of chains 70
    task = make_task((1 << 18,), (1, 1), "R", (4, 1), "R", dtype="float32")
    made = plan(task, Network(latency=1e-5, issue="none"))
    assert made.strategy == "waves" and made.seconds < 1.08 * made.lower_bound


def test_parts_that_are_relayed_arrive_one_after_the_other(make_task):
    # 23 KB take 18.5 us on a card. Were all parts to share it, they would arrive after 28.5, and be
    # passed on to two others in 12.3 and 10 more
    task = make_task((5768,), (1, 1), "R", (3, 1), "R", dtype="float32")
    made = plan(task, Network(latency=1e-5, issue="none"))
    assert made.strategy == "paced_waves" and made.seconds < 37e-6
    leaving = [index for index, each in enumerate(made.transfers) if each.sender == 0]
    ends = simulate(task, made.transfers, Network(latency=1e-5, issue="none")).intervals
    arrived = {round(ends[index][1] * 1e9) for index in leaving}
    assert len(arrived) >= 16
