from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from summands import random_sum, task_of

from resharding import HostExecutor, HostTransport, Network, TransportError, new_token, plan
from resharding import sum_transport as module
from resharding.slices import all_tiles, summand_groups
from resharding.sum_transport import parts_of_sum
from resharding.sums import split_plan


def owners(task):
    return {
        device: f"host {host}"
        for placed in (task.source, task.target)
        for device, host in zip(placed.devices, placed.hosts, strict=True)
    }


@pytest.fixture
def team():
    """Return a function that makes the transports of a task's hosts, which know each other."""
    made: list[HostTransport] = []

    def make(owner_of):
        token = new_token()
        ends = {name: HostTransport(name, token) for name in dict.fromkeys(owner_of.values())}
        made.extend(ends.values())
        for end in ends.values():
            end.connect({name: other.address for name, other in ends.items()}, owner_of)
        return ends

    yield make
    for end in made:
        end.close()


def post(ends, made, shards, key="k"):
    owner_of = owners(made.task)
    sendings, receivings = [], []
    for name, end in ends.items():
        own = {device: tile for device, tile in shards.items() if owner_of[device] == name}
        if own:
            sendings.append(end.send(key, made, lambda own=own: own))
        if name in [owner_of[device] for device in made.task.target.devices]:
            receivings.append(end.receive(key, made))
    return sendings, receivings


def fractions(task, seed):
    """Return summands of which another order of additions makes other bits; groups of devices with
    the same tile have the same ones."""
    draw, tiles = np.random.default_rng(seed), all_tiles(task.source, task.tensor.shape)
    known: dict[tuple[Any, int], np.ndarray] = {}
    return {
        device: known.setdefault((tiles[group[0]], k), draw.random(tiles[device].shape, np.float32))
        for group in summand_groups(task.source)
        for k, device in enumerate(group)
    }


@pytest.mark.parametrize("chunk", [64, 4 << 20])
def test_processes_get_the_sums_the_host_executor_gives_bit_for_bit(team, monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    count = crossing = 0
    for seed in range(60):
        task = random_sum(seed)
        if task is None:
            continue
        made = plan(task, Network(issue="none", latency=1e-6))
        count += 1
        owner_of = owners(task)
        steps = [
            step
            for name in set(owner_of.values())
            for step in parts_of_sum(made).steps(name, owner_of)
        ]
        crossing += any(step.before is not None for step in steps)
        shards = fractions(task, seed)
        sendings, receivings = post(team(owner_of), made, shards)
        found = {device: tile for each in receivings for device, tile in each.result(100).items()}
        for sending in sendings:
            sending.taken(100)
            sending.result(100)
        for device, expected in HostExecutor(made).run(shards).items():
            np.testing.assert_array_equal(found[device].view(np.float32), expected.reshape(-1))
    assert count > 20 and crossing > 10


def test_processes_work_off_chains_without_waiting_for_each_other_in_a_circle():
    task = task_of((4096,), "4x2:R+host+device", "1x1:R")
    parts, owner_of = parts_of_sum(plan(task, Network(issue="none"))), owners(task)
    queues = {name: list(parts.steps(name, owner_of)) for name in set(owner_of.values())}
    assert len(parts.chains) == 8
    done = set()
    while any(queues.values()):
        ready = [
            name
            for name, queue in queues.items()
            if queue
            and (
                queue[0].before is None
                or (queue[0].chain, queue[0].position - 1, queue[0].chunk) in done
            )
        ]
        assert ready, "all processes wait"
        for name in ready:
            step = queues[name].pop(0)
            done.add((step.chain, step.position, step.chunk))


def test_a_process_without_tiles_fails_the_receivers_of_the_sum(team):
    task = task_of((64,), "2x1:R+host", "1x1:R")
    made = plan(task, Network(issue="none"))
    ends = team(owners(task))

    def nothing():
        raise RuntimeError("the step was given up")

    failed = ends["host 0"].send("k", made, nothing)
    other = ends["host 1"].send("k", made, lambda: {100: np.ones(64, np.float32)})
    receiving = ends["host 4"].receive("k", made)
    with pytest.raises(RuntimeError, match="the step was given up"):
        failed.result(100)
    with pytest.raises(TransportError, match="host 4, k: .*host 0 failed to send it"):
        receiving.result(100)
    del other


def test_who_waits_for_a_summand_that_fails_is_told(team):
    # small: summed up on one device, at the end of a chain through three hosts
    task = task_of((8,), "3x1:R+host", "1x1:R")
    made = plan(task, Network(issue="host", latency=1e-5))
    (chain,) = [one for one in made.transfers if one.method == "reduce"]
    broken = owners(task)[chain.receivers[0]]  # in the middle: sends nothing to the target

    def nothing():
        raise RuntimeError("the step was given up")

    ends, sendings = team(owners(task)), []
    for device in task.source.devices:
        name = owners(task)[device]
        tiles = nothing if name == broken else lambda d=device: {d: np.ones(8, np.float32)}
        sendings.append(ends[name].send("k", made, tiles))
    with pytest.raises(TransportError, match="failed to send it"):
        ends["host 4"].receive("k", made).result(100)


def test_reductions_that_leave_no_layout_are_refused():
    task = task_of((8,), "1x4:R+device", "1x1:R")
    made = plan(task, Network(issue="none"))
    sums = [one for one in made.transfers if one.method == "reduce"]
    whole = evolve(sums[0], start=(0,), stop=(8,), after=())
    rest = tuple(evolve(one, after=()) for one in sums[1:])
    with pytest.raises(ValueError, match="must come first and leave each device its tile"):
        split_plan(evolve(made, transfers=(whole, *rest)))


def test_tiles_of_a_sum_cover_what_is_moved():
    task = task_of((32, 4), "2x2:S0,R+device", "1x1:R,R")
    parts = parts_of_sum(plan(task, Network(issue="none")))
    cells = sum(tile.size for tile in all_tiles(parts.moves.task.source, (32, 4)).values())
    assert cells == 128 and not parts.moves.task.source.spec.partial


def summand_process(pipe, token, name, made, value):
    """Send one summand from a process of its own."""
    end = HostTransport(name, token)
    pipe.send(end.address)
    end.connect(pipe.recv(), owners(made.task))
    (device,) = (device for device, owner in owners(made.task).items() if owner == name)
    tile = np.arange(made.task.tensor.size, dtype=np.float32) * value
    end.send("k", made, lambda: {device: tile}).result(100)
    pipe.recv()
    end.close()


def test_processes_of_their_own_sum_up_in_each_others_memory():
    # 12 MB a summand: three processes, of which each adds chunks to those of the one before
    task = task_of((3_000_000,), "3x1:R+host", "1x1:R")
    made, token, context = plan(task, Network(issue="none")), new_token(), get_context("spawn")
    end, pipes, processes = HostTransport("host 4", token), {}, []
    for k, name in enumerate(("host 0", "host 1", "host 2")):
        pipes[name], theirs = context.Pipe()
        process = context.Process(target=summand_process, args=(theirs, token, name, made, 10**k))
        process.start()
        processes.append(process)
    addresses = {name: pipe.recv() for name, pipe in pipes.items()} | {"host 4": end.address}
    for name, pipe in pipes.items():
        pipe.send({other: at for other, at in addresses.items() if other != name})
    end.connect(addresses, owners(task))
    (tile,) = end.receive("k", made).result(100).values()
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send("end")
        process.join(100)
        assert process.exitcode == 0
    end.close()
    size = np.arange(3_000_000, dtype=np.float32)
    shards = {device: size * 10**k for k, device in enumerate(task.source.devices)}
    (expected,) = HostExecutor(made).run(shards).values()
    np.testing.assert_array_equal(tile.view(np.float32), expected)
