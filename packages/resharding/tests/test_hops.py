import numpy as np
import pytest

from resharding import Network, device_tiles, plan
from resharding import hops as module
from resharding.hops import steps_of
from resharding.strategies import STRATEGIES


@pytest.mark.parametrize("issue", ["host", "none"])
@pytest.mark.parametrize("strategy", [*STRATEGIES])
def test_a_rank_passes_on_only_what_it_had_before_the_step(make_task, monkeypatch, strategy, issue):
    monkeypatch.setattr(module, "LEAST_CHUNK_BYTES", 64)
    task = make_task((32, 8), (2, 2), "S0 R", (3, 2), "R S1")
    made = plan(task, Network(latency=1e-8, issue=issue), strategy)
    tiles, shape = device_tiles(task.source, task.tensor.shape, "source"), task.tensor.shape
    held = {d: np.zeros((*shape, 4), bool) for d in (*task.source.devices, *task.target.devices)}
    for device, tile in tiles.items():
        held[device][tile.within((0, 0))] = True
    for step in steps_of(made):
        arrived = []
        for hop in step:
            chunk = np.zeros((*shape, 4), bool)
            inside = np.arange(hop.box.size * 4).reshape(*hop.box.shape, 4)
            chunk[hop.box.within((0, 0))] = (hop.begin <= inside) & (inside < hop.end)
            assert held[hop.sender][chunk].all()
            arrived.append((hop.receiver, chunk))
        for receiver, chunk in arrived:
            held[receiver] |= chunk
    for device, tile in device_tiles(task.target, shape, "target").items():
        assert held[device][tile.within((0, 0))].all()


def test_transfers_that_wait_for_nothing_start_together(make_task):
    task = make_task((640, 80), (2, 2), "S0 S1", (3, 2), "R R")
    made = plan(task, Network(latency=1e-5, issue="none"), "waves")
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
