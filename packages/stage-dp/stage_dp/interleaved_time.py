"""Step times of many interleaved pipelines at once: the longest path of pipeline_time.py by levels.

The runs of a schedule that wait for none of one another are a level: the longest chain of runs that
each waits for has as many. All runs of a level are computed together, for all pipelines.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from stage_dp.interleaved_order import FULL, Index, interleaved_order
from stage_dp.schedules import SCHEDULE_RULES, Schedule, order

Array = NDArray[np.float64]

INTERLEAVED = next(rule for rule in SCHEDULE_RULES.values() if rule.interleaves)
# Of times that are kept until they are read, so that a search takes no more memory than its menu;
# more pipelines are computed one part after another. Some 4,900 of 16 stages and 24 microbatches
# fit, more than the neighbours of one.
MOST_BYTES = 32e6


def estimated_seconds(
    num_meshes: int, count: int, forward: Array, backward: Array, boundary: Array, tail: Array
) -> Array:
    """Return the step time of each pipeline with `count` microbatches, [pipelines]. Where they are
    many it is estimated from two short runs, as a mesh that is slower by a little may take over
    late: each round of microbatches takes what it does there, or the work of the busiest mesh.

    `forward`, `backward`: [pipelines, stages]; `boundary`: one way, [pipelines, stages - 1];
    `tail`: once per step, [pipelines, meshes].
    """
    short = FULL * num_meshes + count % num_meshes
    if count <= short + num_meshes:
        return interleaved_seconds(num_meshes, count, forward, backward, boundary, tail)
    first, second = (
        interleaved_seconds(num_meshes, one, forward, backward, boundary, tail)
        for one in (short, short + num_meshes)
    )
    work = (forward + backward).reshape(len(forward), -1, num_meshes).sum(axis=1)
    more = np.maximum(second - first, num_meshes * work.max(axis=1))
    seconds: Array = first + (count - short) / num_meshes * more
    return seconds


def interleaved_seconds(
    num_meshes: int, count: int, forward: Array, backward: Array, boundary: Array, tail: Array
) -> Array:
    """Return the step time of each pipeline with `count` microbatches: [pipelines]. Arrays are
    those of `estimated_seconds`."""
    size, num = forward.shape
    levels = _levels(num, count, num_meshes)
    work = np.stack([forward.T, backward.T])  # [2, stages, pipelines]
    crossing = np.concatenate([boundary.T, np.zeros((1, size))])
    most = max(1, int(MOST_BYTES / (16 * (num + 1) * count)))
    parts = [slice(at, at + most) for at in range(0, size, most)]
    return np.concatenate(
        [_seconds(levels, work[:, :, own], crossing[:, own], tail.T[:, own]) for own in parts]
    )


@frozen(eq=False)
class _Levels:
    """The runs of a schedule, level after level: `start` [levels + 1] where each begins."""

    num_meshes: int
    num_microbatches: int
    back: Index  # 0: forward, 1: backward
    stage: Index
    microbatch: Index
    start: Index

    def __iter__(self) -> Iterator[tuple[Index, Index, Index]]:
        for at, stop in zip(self.start[:-1].tolist(), self.start[1:].tolist(), strict=True):
            yield self.back[at:stop], self.stage[at:stop], self.microbatch[at:stop]


def _seconds(levels: _Levels, work: Array, crossing: Array, tail: Array) -> Array:
    _, num, size = work.shape
    meshes = levels.num_meshes
    clock = np.zeros((meshes, size))
    link = np.zeros((meshes, meshes, size))  # from, to
    # When a stage has what it reads, there and back; what the last stage sends on nobody reads.
    arrived = np.zeros((2, num + 1, levels.num_microbatches, size))
    for back, stage, microbatch in levels:
        mesh = stage % meshes
        stop = np.maximum(clock[mesh], arrived[back, stage, microbatch]) + work[back, stage]
        clock[mesh] = stop
        following = stage + 1 - 2 * back
        target = following % meshes
        if meshes > 1:
            stop = np.maximum(stop, link[mesh, target]) + crossing[np.minimum(stage, following)]
            link[mesh, target] = stop
        arrived[back, following, microbatch] = stop
    seconds: Array = (clock + tail).max(axis=0)
    return seconds


@functools.lru_cache(maxsize=16)  # of 20,000 runs at most each; to order them takes longest
def interleaved_schedule(num_stages: int, count: int, num_meshes: int) -> Schedule:
    """Return the order of the runs of an interleaved pipeline."""
    return order(INTERLEAVED.name, num_stages, count, num_meshes=num_meshes)


@functools.lru_cache(maxsize=32)  # of 20,000 runs at most each
def _levels(num_stages: int, count: int, num_meshes: int) -> _Levels:
    schedule = interleaved_order(num_meshes, num_stages // num_meshes, count)
    waiting = [iter(schedule.runs(mesh).tolist()) for mesh in range(num_meshes)]
    following = [next(runs, None) for runs in waiting]
    on_mesh = [0] * num_meshes
    # By what is read, the level after that which makes it; the ends wait for nothing.
    made = [{(end, at): 0 for at in range(count)} for end in (0, num_stages - 1)]
    found = []
    moved = True
    while moved:
        moved = False
        for mesh, runs in enumerate(waiting):
            while (run := following[mesh]) is not None:
                way, at, number = run
                ready = made[way].get((at, number))
                if ready is None:
                    break
                level = max(on_mesh[mesh], ready)
                on_mesh[mesh] = made[way][at + 1 - 2 * way, number] = level + 1
                found.append((level, way, at, number))
                following[mesh], moved = next(runs, None), True
    table = np.array(sorted(found), dtype=np.int64)
    start = np.searchsorted(table[:, 0], np.arange(int(table[-1, 0]) + 2))
    back, stage, microbatch = table[:, 1:].T
    return _Levels(num_meshes, count, back, stage, microbatch, start)
