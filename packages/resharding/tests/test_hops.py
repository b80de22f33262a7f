import pytest

from resharding import Network, plan
from resharding import hops as module
from resharding.hops import steps_of
from resharding.strategies import STRATEGIES


@pytest.mark.parametrize("issue", ["host", "none"])
@pytest.mark.parametrize("strategy", [*STRATEGIES])
def test_a_rank_passes_on_only_what_it_had_before_the_step(make_task, monkeypatch, strategy, issue):
    monkeypatch.setattr(module, "LEAST_CHUNK_BYTES", 64)
    task = make_task((32, 8), (2, 2), "S0 R", (3, 2), "R S1")
    made = plan(task, Network(latency=1e-8, issue=issue), strategy)
    held = {(device, None) for device in task.source.devices}
    for step in steps_of(made):
        arriving = set()
        for hop in step:
            chunk = (hop.box, hop.begin, hop.end)
            assert (hop.sender, None) in held or (hop.sender, chunk) in held
            arriving.add((hop.receiver, chunk))
        held |= arriving


def test_transfers_that_wait_for_nothing_start_together(make_task):
    task = make_task((64, 8), (2, 2), "S0 S1", (3, 2), "R R")
    made = plan(task, Network(latency=1e-5, issue="none"), "exchange")
    steps = steps_of(made)  # to a host, to the other hosts, to the other devices of each
    assert len(made.transfers) > 20 and len(steps) == 3
    assert {hop.sender for hop in steps[0]} <= set(task.source.devices)


def test_chunks_are_cut_without_a_rest(make_task, monkeypatch):
    monkeypatch.setattr(module, "LEAST_CHUNK_BYTES", 100)
    task = make_task((1000,), (1, 1), "R", (2, 1), "R")
    steps = steps_of(plan(task, Network(), "broadcast"))
    for sender, receiver in ((0, 100), (100, 200)):
        hops = [h for step in steps for h in step if (h.sender, h.receiver) == (sender, receiver)]
        assert [hop.begin for hop in hops[1:]] == [hop.end for hop in hops[:-1]]
        assert hops[0].begin == 0 and hops[-1].end == 4000 and len(hops) <= 40
