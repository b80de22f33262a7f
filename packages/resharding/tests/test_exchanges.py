import numpy as np
import pytest

from alpa_interchange import ReshardingTask, TensorType
from resharding import HostExecutor, Network, check_plan, cut_slices, plan
from resharding.network import Links
from resharding.notation import parse_placed
from resharding.routes import routes_of
from resharding.slices import hosts_of
from resharding.tiles import tiles_by_rounds
from resharding.traffic import edge_bytes, gathered_pieces


def task(source, target, shape=(64, 48)):
    left = parse_placed(source)
    right = parse_placed(target, max(left.hosts) + 1)
    return ReshardingTask(tensor=TensorType(shape, "int32"), source=left, target=right)


def test_rings_of_two_take_five_latencies_among_32_devices_in_place_of_31():
    network = Network(issue="device", latency=1.0, nic_bandwidth=1e9)
    one = task("4x8:S01,R", "4x8:R,R")
    seconds = {
        name: plan(one, network, name).seconds for name in ("tile_exchange", "tile_all_gather")
    }
    # a slice to each device, then log2(32) rings of two, or one ring of 32
    assert seconds["tile_exchange"] == pytest.approx(1 + 5, rel=1e-3)
    assert seconds["tile_all_gather"] == pytest.approx(1 + 31, rel=1e-3)
    assert plan(one, network).seconds == pytest.approx(6, rel=1e-3)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("4x8:S01,R", "4x8:R,R"),
        ("2x3:S0,S1", "3x4:R,S1"),
        ("1x1:R,R", "3x2:R,R"),
        ("3x2:S10,R", "2x6:S0,R"),
    ],
)
def test_gathers_of_gathers_bring_every_tile(source, target):
    one = task(source, target)
    made = plan(one, Network(issue="device", latency=1e-5), "tile_exchange")
    check_plan(made)
    executor = HostExecutor(made)
    whole = np.arange(one.tensor.size, dtype=np.int32).reshape(one.tensor.shape)
    shards = {d: whole[box.within((0, 0))] for d, box in executor.source_tiles.items()}
    moved = executor.run(shards)
    for device, box in executor.target_tiles.items():
        np.testing.assert_array_equal(moved[device], whole[box.within((0, 0))])


def test_a_gather_of_gathers_exchanges_what_they_gathered():
    made = plan(task("4x1:S0,R", "4x1:R,R"), Network(issue="device", latency=1e-5), "tile_exchange")
    first, second = (
        [each for each in made.transfers if each.method == "gather" and each.after[-1] < 4],
        [each for each in made.transfers if each.method == "gather" and each.after[-1] >= 4],
    )
    assert len(first) == len(second) == 2
    for ring in second:
        owned = dict.fromkeys(ring.receivers, 0)
        for owner, piece in gathered_pieces(made.transfers, ring):
            owned[owner] += piece.size
        assert list(owned.values()) == [64 * 48 // 2] * 2
        assert edge_bytes(ring, 4, made.transfers) == 64 * 48 // 2 * 4


def test_processes_are_sent_what_rings_of_rings_gather_once():
    one = task("4x2:S01,R", "2x4:R,R")
    made = plan(one, Network(issue="device", latency=1e-5), "tile_exchange")
    routes = routes_of(made, {device: f"host {host}" for device, host in hosts_of(one).items()})
    arrived: dict[str, int] = {}
    for route in routes:
        for name in route.chain[1:]:
            arrived[name] = arrived.get(name, 0) + route.box.size
    assert arrived == {"host 4": 64 * 48, "host 5": 64 * 48}


@pytest.mark.parametrize("issue", ["host", "device"])
def test_the_gather_with_the_fewest_latencies_is_tried_first(issue):
    one = task("4x8:S01,R", "4x8:R,R")
    links = Links(Network(issue=issue, latency=1.0), hosts_of(one))
    names = tiles_by_rounds(cut_slices(one), links)
    seconds = [plan(one, links.network, name).seconds for name in names]
    assert seconds[0] == min(seconds)
