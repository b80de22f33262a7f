import pytest

from resharding import Network, plan
from resharding.cases import random_task
from resharding.routes import part_of, routes_of
from resharding.slices import device_tiles


def owners(task):
    return {
        device: f"host {host}"
        for placed in (task.source, task.target)
        for device, host in zip(placed.devices, placed.hosts, strict=True)
    }


def cells(box):
    index: list[tuple[int, ...]] = [()]
    for start, stop in zip(box.start, box.stop, strict=True):
        index = [(*known, k) for known in index for k in range(start, stop)]
    return set(index)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("strategy", ["broadcast", "send_recv", "waves", "star", "auto"])
def test_every_process_gets_each_element_it_lacks_once(strategy, overlap):
    for seed in range(25):
        task = random_task(seed, longest=8, overlap=overlap)
        made, owner_of = plan(task, Network(), strategy), owners(task)
        source = device_tiles(task.source, task.tensor.shape, "source")
        for name in dict.fromkeys(owner_of.values()):
            part = part_of(name, made, owner_of)
            there = {c for d, box in source.items() if owner_of[d] == name for c in cells(box)}
            came = [
                cell
                for k, (sender, _) in part.received.items()
                if sender != name
                for cell in cells(part.boxes[k])
            ]
            needed = {c for box in part.target.values() for c in cells(box)}
            assert len(came) == len(set(came)) and set(came) >= needed - there
            assert set(came) <= needed


def test_a_gather_becomes_a_chain_behind_the_copy_that_feeds_it():
    task = next(
        task
        for task in map(random_task, range(100))
        if any(t.method == "gather" for t in plan(task, Network(), "global_all_gather").transfers)
        and len(set(task.target.hosts)) > 2
    )
    made, owner_of = plan(task, Network(), "global_all_gather"), owners(task)
    holders = set(task.source.hosts)
    for route in routes_of(made, owner_of):
        assert int(route.chain[0].split()[1]) in holders
        assert len(set(route.chain)) == len(route.chain)


def test_a_route_waits_for_what_its_transfer_comes_after():
    waiting = 0
    for seed in range(60):
        made = plan(random_task(seed, longest=8), Network(issue="none"), "broadcast")
        owner_of = owners(made.task)
        routes = routes_of(made, owner_of)
        for number, route in enumerate(routes):
            assert all(earlier < number for earlier in route.after)
            waiting += bool(route.after)
        for name in dict.fromkeys(owner_of.values()):
            part = part_of(name, made, owner_of)
            for number, before in part.waits.items():
                first = routes[number].chain[0]
                here = {
                    k
                    for k, route in enumerate(routes)
                    if name in route.chain and (name == first or route.chain[0] != first)
                }
                assert set(before) == here & set(routes[number].after)
    assert waiting > 0


def test_parts_that_follow_each_other_on_one_way_are_one_box(make_task):
    # parts go to each of 3 hosts, every one when the last has left, and in the end others to all
    task = make_task((56, 103), (1, 1), "R R", (3, 1), "R R", dtype="float32")
    made = plan(task, Network(latency=1e-5, issue="none"), "paced_waves")
    leaving = [each for each in made.transfers if each.sender == 0]
    routes = routes_of(made, owners(task))
    assert len(leaving) > 36 and len(routes) == 6
    assert sorted({len(route.chain) for route in routes}) == [2, 4]


def test_parts_that_go_the_same_way_are_one_box(make_task):
    # 8 devices of a host get 1 MB: parts enter by different devices, for the process it is one
    task = make_task((1 << 18,), (1, 1), "R", (1, 8), "R", dtype="float32")
    made = plan(task, Network(latency=1e-5, issue="none"), "star")
    entering = [t for t in made.transfers if not t.after]
    assert len(entering) >= len({t.receivers for t in entering}) == 8
    (route,) = routes_of(made, owners(task))
    assert route.box.shape == (1 << 18,) and route.chain == ("host 0", "host 1")


def test_no_box_is_more_than_a_tile(make_task):
    # rows over the devices of one process: each device needs its own tile
    task = make_task((8, 4), (1, 1), "R R", (1, 4), "S1 R")
    routes = routes_of(plan(task, Network(issue="none"), "broadcast"), owners(task))
    assert [route.box.shape for route in routes] == [(2, 4)] * 4
