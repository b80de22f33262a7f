"""Exact step time of a pipeline: the longest path through its schedule (max-plus).

A step starts when its mesh is free and what it reads has arrived. Crossing boundary i takes c_i
seconds in either direction, none where both stages are on one mesh; from each mesh to each other
goes a link of its own that carries one transfer at a time, in the order of the runs that made them,
beside the compute. After its last step a mesh runs its synchronisation and update.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from stage_dp.schedules import Schedule

Times = Sequence[float] | NDArray[np.float64] | Sequence[Sequence[float]]


@frozen(kw_only=True)
class PipelineTime:
    """Seconds of one training step, and per mesh when its last run and its update end."""

    step_seconds: float
    pipeline_stop: tuple[float, ...]
    busy_seconds: tuple[float, ...]  # per mesh, compute only


def pipeline_time(
    schedule: Schedule,
    forward: Times,
    backward: Times,
    boundary: Times = (),
    tail: Sequence[float] = (),
    *,
    weight: Times = (),
) -> PipelineTime:
    """Return the step time of `schedule`.

    A unit is a microbatch or, where the tokens are cut, one slice of it: unit `microbatch *
    num_slices + slice_index`. `forward`, `backward`: seconds of a unit per stage [stages], or
    [stages, units] where they differ. `boundary`: one-way seconds [stages - 1], or
    [stages - 1, units]. `tail`: seconds per mesh once per step. `weight`: for schedules that
    split the backward, the part of `backward` that only weights wait for; as `forward`.
    """
    n, m = schedule.num_stages, schedule.num_microbatches * schedule.num_slices
    work = {"forward": _grid(forward, n, m), "backward": _grid(backward, n, m)}
    later = _grid(weight, n, m) if len(weight) else [[0.0] * m for _ in range(n)]
    work["backward_weight"] = later
    work["backward_input"] = [
        [whole - part for whole, part in zip(*rows, strict=True)]
        for rows in zip(work["backward"], later, strict=True)
    ]
    crossing = _grid(boundary, n - 1, m) if len(boundary) else [[0.0] * m for _ in range(n)]
    arrived: dict[tuple[bool, int, int], float] = {}
    done: dict[tuple[int, int], float] = {}  # forwards
    meshes = [schedule.mesh_of(stage) for stage in range(n)]
    clock = [0.0] * schedule.num_meshes
    busy = [0.0] * schedule.num_meshes
    link: dict[tuple[int, int], float] = {}
    for step in schedule.global_order():
        stage, unit = step.stage, step.microbatch * schedule.num_slices + step.slice_index
        mesh = meshes[stage]
        is_forward = step.phase == "forward"
        start = clock[mesh]
        if schedule.num_slices > 1 and step.phase == "backward_input":
            if not stage and not work[step.phase][stage][unit]:
                continue  # nothing runs: the slices' backwards by weight wait each for its own
        if step.phase != "backward_weight" or schedule.num_slices > 1:
            start = max(start, arrived.get((is_forward, stage, unit), 0.0))
        if not is_forward:
            start = max(start, done[stage, unit])
        seconds = work[step.phase][stage][unit]
        stop = start + seconds
        clock[mesh] = stop
        busy[mesh] += seconds
        if is_forward:
            done[stage, unit] = stop
        following = stage + 1 if is_forward else stage - 1
        if 0 <= following < n and step.phase != "backward_weight":
            sent, target = stop, meshes[following]
            if target != mesh:
                sent = max(stop, link.get((mesh, target), 0.0))
                sent += crossing[min(stage, following)][unit]
                link[mesh, target] = sent
            arrived[is_forward, following, unit] = sent
    ends = [stop + (tail[mesh] if mesh < len(tail) else 0.0) for mesh, stop in enumerate(clock)]
    return PipelineTime(
        step_seconds=max(ends), pipeline_stop=tuple(clock), busy_seconds=tuple(busy)
    )


def _grid(times: Times, num_rows: int, num_units: int) -> list[list[float]]:
    array = np.asarray(times, dtype=np.float64)
    if array.shape[:1] != (num_rows,):
        raise ValueError(f"times need one row per stage or boundary: {num_rows}, got {array.shape}")
    if array.ndim == 1:
        array = np.repeat(array[:, None], num_units, axis=1)
    if array.shape != (num_rows, num_units):
        raise ValueError(f"times must have shape {(num_rows, num_units)}, got {array.shape}")
    result: list[list[float]] = array.tolist()
    return result
