"""What to tell where no pipeline fits: the least that is missing, and the cheapest remedy.

A remedy is a change of the problem after which some plan fits: another schedule, a free number of
stages, twice the hosts; where none of these does, memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import evolve

from alpa_interchange.stage import StageProblem
from stage_dp.infeasibility import InfeasibleError
from stage_dp.stage_table import StageTable, Sweep, tables_of


def infeasible(
    problem: StageProblem, tables: Sequence[StageTable], lacking: float
) -> InfeasibleError:
    """Return what to tell where nothing fits; interleaved plans lack at least `lacking` bytes."""
    missing = min([lacking, *(_least_missing(table) for table in tables)])
    if math.isinf(missing) and not tables:
        stages = problem.num_stages or "a multiple of the meshes as number of"
        return InfeasibleError(
            f"no interleaved pipeline: it takes at least two equal submeshes with two or more of "
            f"{problem.num_layers} layers each, and {stages} stages; name another schedule"
        )
    if math.isinf(missing):
        return InfeasibleError(_gap_in_candidates(problem))
    remedies = []
    others = [s for s in ("1f1b", "sequential") if s not in problem.schedules]
    for schedule in others:
        if _possible(evolve(problem, schedules=(schedule,))):
            remedies.append(
                f"allow the schedule {schedule!r}, which keeps fewer microbatches alive"
            )
            break
    if not remedies and problem.num_stages is not None:
        if _possible(evolve(problem, num_stages=None)):
            remedies.append("leave num_stages free")
    if not remedies:
        more = tuple(evolve(g, num_hosts=2 * g.num_hosts) for g in problem.device_groups)
        if _possible(evolve(problem, device_groups=more, use_all_devices=False)):
            remedies.append("use twice the hosts")
    remedies.append(f"free {missing / 1e9:.3g} GB per device (a smaller batch, recomputation)")
    return InfeasibleError(
        f"no pipeline fits in memory: the least demanding one is {missing:.0f} bytes per device "
        f"over. Cheapest remedy: {remedies[0]}",
        missing_bytes=missing,
        remedy=remedies[0],
    )


def _possible(problem: StageProblem) -> bool:
    return any(_least_missing(table) <= 0 for table in tables_of(problem))


def _least_missing(table: StageTable) -> float:
    """Return the bytes per device by which the least demanding plan exceeds memory (0: it fits)."""
    return Sweep(
        table,
        allowed=np.ones(len(table.candidates), dtype=bool),
        weight=table.cost,
        combine="missing",
        use_memory=False,
        per_level=True,
    ).best()


def _gap_in_candidates(problem: StageProblem) -> str:
    covered = {layer for c in problem.candidates for layer in range(c.layer_start, c.layer_stop)}
    bare = sorted(set(range(problem.num_layers)) - covered)
    if bare:
        return f"no candidate covers layers {bare[:8]}; add candidates for them"
    devices = [(g.num_hosts, g.devices_per_host) for g in problem.device_groups]
    stages = "" if problem.num_stages is None else f" with {problem.num_stages} stages"
    return (
        f"no chain of candidates{stages} covers all {problem.num_layers} layers on {devices} "
        "(hosts, devices per host) even without a memory limit; add candidates with smaller "
        "submeshes"
        + (", or allow idle devices (use_all_devices=False)" if problem.use_all_devices else "")
    )
