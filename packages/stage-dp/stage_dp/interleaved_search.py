"""Interleaved pipelines: equal submeshes that run several stages (chunks) each.

Stage s of n runs on mesh s mod p, all on submeshes of one size with one logical mesh. For each such
class of candidates, number of meshes p and chunks v = n / p, the layers are cut where the slowest
stage is fastest, and among those cuts where the sum is least. -> _balanced()

The combinations are scored by the exact longest path in the order of

    B t + (p - 1) t / v,   t = seconds per microbatch of the busiest mesh

(Megatron-LM, Narayanan et al. 2021, section 2.2), the first of them only: a heuristic, unlike the
search in stage_construction.py. The bound is on every plan: each layer's least device-seconds,
shared evenly by all devices. -> device_seconds_bound()
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from alpa_interchange.mesh import LogicalMesh, SubmeshSpec
from alpa_interchange.stage import StageCandidate, StageProblem
from stage_dp.device_pool import place
from stage_dp.interleaved_order import holding_order
from stage_dp.mesh_memory import Chunk, bytes_together

INTERLEAVED = "interleaved-1f1b"
MAX_CHUNKS = 4  # from 4 to 8 chunks (p-1)/v falls by 1/8 of a microbatch, transfers double
PLANS_SCORED = 8

Chain = tuple[StageCandidate, ...]
Ranges = dict[tuple[int, int], list[StageCandidate]]


@frozen(kw_only=True)
class Interleaved:
    """A chain of stages on `num_meshes` meshes: its estimate and the bytes it lacks per device."""

    candidates: Chain
    num_meshes: int
    estimate: float
    in_flight: tuple[int, ...] = ()
    missing_bytes: float = 0.0


def interleaved_plans(problem: StageProblem) -> list[Interleaved]:
    """Return the plans to score, by estimate; where none fits, the one that lacks least memory."""
    chosen: list[Interleaved] = []
    closest: Interleaved | None = None
    for plan in sorted(_plans(problem), key=lambda plan: plan.estimate):
        held = with_memory(problem, plan)
        if held.missing_bytes <= 0:
            chosen.append(held)
        elif closest is None or held.missing_bytes < closest.missing_bytes:
            closest = held
        if len(chosen) == PLANS_SCORED:
            break
    if not chosen and closest is not None:
        return [closest]
    return chosen


def with_memory(problem: StageProblem, plan: Interleaved) -> Interleaved:
    """Return the plan with its microbatches in flight and the bytes it lacks."""
    chain, meshes = plan.candidates, plan.num_meshes
    runs = holding_order(meshes, len(chain) // meshes, chain[0].num_microbatches)
    missing = 0.0
    for mesh in range(meshes):
        chunks = [
            Chunk(c.state_bytes + k * c.activation_bytes, k, c.activation_bytes, c.transient_bytes)
            for c, k in zip(chain[mesh::meshes], runs.in_flight[mesh::meshes], strict=True)
        ]
        memory = problem.device_groups[chain[mesh].submesh.host_group].memory
        missing = max(missing, bytes_together(chunks, runs.alive[mesh]) - memory * (1 + 1e-12))
    return Interleaved(
        candidates=chain,
        num_meshes=meshes,
        estimate=plan.estimate,
        in_flight=runs.in_flight,
        missing_bytes=missing,
    )


def device_seconds_bound(problem: StageProblem) -> float:
    """Return seconds that no pipeline of any schedule can beat (inf: no candidates cover all)."""
    total = sum(group.num_hosts * group.devices_per_host for group in problem.device_groups)
    counts = {candidate.num_microbatches for candidate in problem.candidates}
    bounds = []
    for count in counts:
        least = np.full(problem.num_layers + 1, math.inf)
        least[0] = 0.0
        for c in sorted(problem.candidates, key=lambda c: c.layer_start):
            if c.num_microbatches == count:
                seconds = min(c.seconds, c.lower_bound_seconds) * c.submesh.num_devices
                reached = least[c.layer_start] + seconds
                least[c.layer_stop] = min(least[c.layer_stop], reached)
        bounds.append(count * float(least[-1]) / total)
    return min(bounds)


def _plans(problem: StageProblem) -> Iterator[Interleaved]:
    classes: dict[tuple[int, SubmeshSpec, LogicalMesh], Ranges] = {}
    for c in problem.candidates:
        ranges = classes.setdefault((c.num_microbatches, c.submesh, c.logical), defaultdict(list))
        ranges[c.layer_start, c.layer_stop].append(c)
    for (count, submesh, _), ranges in classes.items():
        for meshes in _mesh_counts(problem, submesh):
            for chunks in range(2, MAX_CHUNKS + 1):
                num_stages = meshes * chunks
                if num_stages > problem.num_layers or problem.num_stages not in (None, num_stages):
                    continue
                for weight in (_seconds, _bytes):
                    chain = _balanced(ranges, problem.num_layers, num_stages, weight)
                    if chain is not None:
                        yield Interleaved(
                            candidates=chain,
                            num_meshes=meshes,
                            estimate=_estimate(chain, meshes, chunks, count),
                        )


def _mesh_counts(problem: StageProblem, submesh: SubmeshSpec) -> list[int]:
    """Return how many meshes of one size there may be, at least two."""
    total = sum(group.num_hosts * group.devices_per_host for group in problem.device_groups)
    found = []
    for meshes in range(2, min(problem.num_layers // 2, total // submesh.num_devices) + 1):
        if problem.use_all_devices and meshes * submesh.num_devices != total:
            continue
        try:
            place(problem.device_groups, [submesh] * meshes)
        except ValueError:
            break
        found.append(meshes)
    return found


def _estimate(chain: Chain, meshes: int, chunks: int, count: int) -> float:
    busiest = max(sum(c.seconds for c in chain[mesh::meshes]) for mesh in range(meshes))
    update = max(sum(c.step_seconds for c in chain[mesh::meshes]) for mesh in range(meshes))
    return count * busiest + (meshes - 1) * busiest / chunks + update


def _seconds(candidate: StageCandidate) -> float:
    return candidate.seconds


def _bytes(candidate: StageCandidate) -> float:
    return candidate.state_bytes + candidate.activation_bytes


def _balanced(
    ranges: Ranges, num_layers: int, num_stages: int, weight: Callable[[StageCandidate], float]
) -> Chain | None:
    """Return the chain of `num_stages` whose slowest stage is fastest, of the candidates that are
    least by `weight` on their ranges; None if there is none."""
    best = {key: min(some, key=weight) for key, some in ranges.items()}
    seconds = np.full((num_layers + 1, num_layers + 1), math.inf)
    for (start, stop), c in best.items():
        seconds[start, stop] = c.seconds
    slowest = _least_chain(seconds, num_stages, np.maximum)[0]
    if math.isinf(slowest):
        return None
    allowed = np.where(seconds <= slowest * (1 + 1e-9), seconds, math.inf)
    cuts: Sequence[int] = _least_chain(allowed, num_stages, np.add)[1]
    return tuple(best[key] for key in zip(cuts[:-1], cuts[1:], strict=True))


def _least_chain(
    seconds: NDArray[np.float64], num_stages: int, combine: np.ufunc
) -> tuple[float, list[int]]:
    """Return the least combination of `num_stages` ranges over all layers, and their borders."""
    value = np.full(len(seconds), math.inf)
    value[0] = 0.0
    before: list[NDArray[np.int64]] = []
    for _ in range(num_stages):
        through = combine(value[:, None], seconds)
        before.append(through.argmin(axis=0))
        value = through.min(axis=0)
    borders = [len(seconds) - 1]
    for choice in reversed(before):
        borders.append(int(choice[borders[-1]]))
    return float(value[-1]), borders[::-1]
