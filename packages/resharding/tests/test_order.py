import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resharding.order import Job, find_order

# devices 10 h + k sit on host h; senders on hosts 0..2, receivers on hosts 3..5
HOST_OF = {10 * host + k: host for host in range(6) for k in range(2)}


@st.composite
def job_lists(draw):
    jobs = []
    for _ in range(draw(st.integers(1, 4))):
        senders = draw(st.sets(st.sampled_from([0, 1, 10, 20]), min_size=1, max_size=3))
        receivers = draw(st.sets(st.sampled_from([30, 40, 41, 50]), min_size=1, max_size=3))
        jobs.append(
            Job(
                seconds=float(draw(st.integers(1, 5))),
                senders=tuple(sorted(senders)),
                receivers=tuple(sorted(receivers)),
            )
        )
    return jobs


def makespan(jobs, sequence, receivers_block=True):
    free: dict[int, float] = {}
    for j, sender in sequence:
        devices = (sender, *jobs[j].receivers) if receivers_block else (sender,)
        lanes = {HOST_OF[device] for device in devices}
        stop = max(free.get(lane, 0.0) for lane in lanes) + jobs[j].seconds
        free.update(dict.fromkeys(lanes, stop))
    return max(free.values())


def best_makespan(jobs, receivers_block=True):
    return min(
        makespan(jobs, [(j, senders[j]) for j in order], receivers_block)
        for senders in itertools.product(*(job.senders for job in jobs))
        for order in itertools.permutations(range(len(jobs)))
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(job_lists(), st.booleans())
def test_small_problems_are_solved_to_the_optimum_of_all_orders_and_senders(jobs, block):
    order = find_order(jobs, HOST_OF, receivers_block=block, node_limit=5000)
    assert sorted(j for j, _ in order.sequence) == list(range(len(jobs)))
    assert all(sender in jobs[j].senders for j, sender in order.sequence)
    assert makespan(jobs, order.sequence, block) == pytest.approx(order.seconds)
    assert order.seconds == pytest.approx(best_makespan(jobs, block))


def test_unequal_durations_are_told_apart():
    # One sender per job; hosts 3 and 4 each take 1 + 2 seconds: alternating order needs 3, not 4.
    jobs = [
        Job(seconds=2.0, senders=(0,), receivers=(30,)),
        Job(seconds=1.0, senders=(0,), receivers=(40,)),
        Job(seconds=1.0, senders=(10,), receivers=(30,)),
        Job(seconds=2.0, senders=(10,), receivers=(40,)),
    ]
    assert find_order(jobs, HOST_OF).seconds == 3.0


def test_equal_input_gives_an_equal_order():
    jobs = [
        Job(seconds=1.0 + k % 3, senders=(0, 10, 20), receivers=(30 + 10 * (k % 3),))
        for k in range(20)
    ]
    assert find_order(jobs, HOST_OF, seed=3) == find_order(jobs, HOST_OF, seed=3)


def test_no_jobs_take_no_time():
    assert find_order([], {}).seconds == 0.0


def test_thousands_of_jobs_are_bundled_and_still_balanced():
    # 2 sending x 2 receiving hosts, 3000 equal jobs: both pairs of hosts are always busy
    jobs = [
        Job(
            seconds=1.0,
            senders=(10 * (k % 2), 10 * (k % 2) + 1),
            receivers=(30 + 10 * (k // 2 % 2),),
        )
        for k in range(3000)
    ]
    order = find_order(jobs, HOST_OF)
    assert sorted(j for j, _ in order.sequence) == list(range(3000))
    assert all(sender in jobs[j].senders for j, sender in order.sequence)
    assert makespan(jobs, order.sequence) == pytest.approx(1500, rel=0.01)
    used = [sender for _, sender in order.sequence]
    assert all(used.count(device) == 750 for device in (0, 1, 10, 11))
