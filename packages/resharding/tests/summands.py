"""Tasks with unreduced sources, and summands for them."""

import random

import numpy as np
from attrs import evolve

from alpa_interchange.reshard import ReshardingTask
from alpa_interchange.tensor import ShardingSpec, TensorType
from resharding.cases import random_task
from resharding.notation import parse_placed
from resharding.slices import all_tiles, summand_groups


def task_of(shape, source, target):
    return ReshardingTask(
        tensor=TensorType(shape, "float32"),
        source=parse_placed(source),
        target=parse_placed(target, 4),
    )


def summands(task):
    """Return random whole numbers for every source device, and their sum."""
    draw, total = np.random.default_rng(0), np.zeros(task.tensor.shape, np.float32)
    tiles = all_tiles(task.source, task.tensor.shape)
    shards: dict[int, np.ndarray] = {}
    added = set()
    for group in summand_groups(task.source):
        tile = tiles[group[0]]
        parts = draw.integers(-9, 9, (len(group), *tile.shape)).astype(np.float32)
        if tile in added:  # what another group has as well
            parts[-1] += total[tile.within((0,) * len(tile.start))] - parts.sum(0)
        else:
            added.add(tile)
            total[tile.within((0,) * len(tile.start))] = parts.sum(0)
        shards.update(zip(group, parts, strict=True))
    return shards, total


def random_sum(seed):
    """Return a random task with a source that is unreduced over one axis or both."""
    task, draw = random_task(seed, longest=24), random.Random(seed)
    used = {axis for dim in task.source.spec.dims for axis in dim}
    free = [axis for axis in ("host", "device") if axis not in used]
    if not free:
        return None
    partial = tuple(draw.sample(free, draw.randint(1, len(free))))
    source = evolve(task.source, spec=ShardingSpec(task.source.spec.dims, partial))
    return evolve(task, source=source, tensor=evolve(task.tensor, dtype="float32"))
