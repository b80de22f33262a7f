"""Plans for an unreduced source, whose devices hold summands of the tensor.

First every part is summed up on one device, by a chain through the devices that hold its p
summands, which adds as it goes (a `reduce` transfer, a broadcast backwards); then the sum is moved
as any other tensor. Where it lies in between is chosen by predicted finish:

    cut over the summands along a dim     every device sends (p-1)/p of its tile
    whole on one device of them           one chain: fewer operations, for small tensors

No plan beats the same move of a tensor that all these devices hold already, nor the time in which
at least p - 1 of the devices that hold an element's summands send it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from attrs import evolve

from alpa_interchange.reshard import PlacedTensor, ReshardingPlan, ReshardingTask, Transfer
from alpa_interchange.tensor import ShardingSpec, dtype_bytes
from resharding.bound import lower_bound
from resharding.course import course, demand_of
from resharding.network import Links, Network
from resharding.slices import Box, all_tiles, cut_slices, hosts_of, summand_groups


def plan_sum(
    task: ReshardingTask,
    network: Network,
    plan_move: Callable[[ReshardingTask], ReshardingPlan],
) -> ReshardingPlan:
    """Return the fastest plan found for a task with an unreduced source; `plan_move` gives those
    of the move of the sum."""
    links = Links(network, hosts_of(task))
    element = dtype_bytes(task.tensor.dtype)
    bound = _bound(task, links)
    best: ReshardingPlan | None = None
    for between in _layouts_between(task):
        moved = plan_move(evolve(task, source=between))
        transfers = _with_sums(task, between, moved.transfers, links, element)
        demands = [demand_of(transfer, element, links, transfers) for transfer in transfers]
        seconds = max((end for _, end in course(transfers, demands, links)), default=0.0)
        if best is None or seconds < best.seconds:
            best = ReshardingPlan(
                task=task,
                transfers=transfers,
                strategy=moved.strategy,
                seconds=seconds,
                lower_bound=bound,
            )
    assert best is not None
    return best


def split_plan(plan: ReshardingPlan) -> tuple[tuple[Transfer, ...], ReshardingPlan]:
    """Return the chains that sum up, and the plan that moves the sum from where they end.

    A plan of `plan_sum` is put together so; ValueError for another that is not.
    """
    count = sum(each.method == "reduce" for each in plan.transfers)
    chains, moves = plan.transfers[:count], plan.transfers[count:]
    ends = {each.receivers[-1]: Box(each.start, each.stop) for each in chains}
    for between in _layouts_between(plan.task):
        tiles = all_tiles(between, plan.task.tensor.shape)
        if ends and ends != {device: tile for device, tile in tiles.items() if tile.size}:
            continue
        shifted = (
            evolve(move, after=tuple(k - count for k in move.after if k >= count)) for move in moves
        )
        task = evolve(plan.task, source=between)
        return chains, evolve(plan, task=task, transfers=tuple(shifted))
    raise ValueError(
        f"the {count} reduce transfers of a plan between processes must come first and leave each "
        f"device its tile of one layout, but they end on {ends}; plan the task with resharding.plan"
    )


def _layouts_between(task: ReshardingTask) -> Iterator[PlacedTensor]:
    """Yield where the sum may lie before it is moved."""
    source, shape = task.source, task.tensor.shape
    axes = source.spec.partial
    own = all_tiles(source, shape)
    for dim in range(len(shape)):
        dims = list(source.spec.dims)
        dims[dim] = (*dims[dim], *axes)
        cut = evolve(source, spec=ShardingSpec(tuple(dims)))
        tiles = all_tiles(cut, shape).items()
        if all(not tile.size or own[device].contains(tile) for device, tile in tiles):
            yield cut
    firsts = {group[0] for group in summand_groups(source)}
    kept = [k for k, name in enumerate(source.axis_names) if name not in axes]
    places = [k for k, device in enumerate(source.devices) if device in firsts]
    yield PlacedTensor(
        spec=ShardingSpec(source.spec.dims),
        axis_names=tuple(source.axis_names[k] for k in kept),
        mesh_shape=tuple(source.mesh_shape[k] for k in kept),
        devices=tuple(source.devices[k] for k in places),
        hosts=tuple(source.hosts[k] for k in places),
    )


def _with_sums(
    task: ReshardingTask,
    between: PlacedTensor,
    moves: Sequence[Transfer],
    links: Links,
    element: float,
) -> tuple[Transfer, ...]:
    """Return the chains that sum up, and the moves behind those that they need."""
    tiles = all_tiles(between, task.tensor.shape)
    sums: list[Transfer] = []
    made: dict[int, int] = {}  # device -> the transfer that sums up its tile
    for group in summand_groups(task.source):
        for k, device in enumerate(group if len(group) > 1 else ()):
            tile = tiles.get(device)
            if tile is None or not tile.size:
                continue
            chain = (*group[k + 1 :], *group[: k + 1])
            rates = [links.hop_rate(a, b) for a, b in itertools.pairwise(chain)]
            made[device] = len(sums)
            sums.append(
                Transfer(
                    method="reduce",
                    start=tile.start,
                    stop=tile.stop,
                    sender=chain[0],
                    receivers=chain[1:],
                    num_chunks=links.network.num_chunks(tile.size * element, rates),
                )
            )
    shifted = []
    for move in moves:
        after = [number + len(sums) for number in move.after]
        if move.sender in made and tiles[move.sender].contains(Box(move.start, move.stop)):
            after.insert(0, made[move.sender])
        shifted.append(evolve(move, after=tuple(after)))
    return (*sums, *shifted)


def _bound(task: ReshardingTask, links: Links) -> float:
    """Return seconds that no plan beats."""
    held = evolve(task, source=evolve(task.source, spec=ShardingSpec(task.source.spec.dims)))
    bound = lower_bound(cut_slices(held), links.host_of, links.network)
    sizes = dict(zip(task.source.axis_names, task.source.mesh_shape, strict=True))
    summands = math.prod(sizes[axis] for axis in task.source.spec.partial)
    rates: dict[Box, float] = {}
    for device, tile in all_tiles(task.source, task.tensor.shape).items():
        rates[tile] = rates.get(tile, 0.0) + links.device_rate[device]
    element = dtype_bytes(task.tensor.dtype)
    return max(
        bound,
        *((summands - 1) * tile.size * element / rate for tile, rate in rates.items()),
    )
