"""Lower bounds on the step time of every pipeline of one microbatch count and schedule.

Stages 0..n-1 run B microbatches; t_i is the lower bound of stage i's forward plus backward
(-> cell_bounds.py), c_i its crossing one way, u_i its step seconds. For any schedule the mesh of
stage i is busy for B t_i, the first forward of i + 1 comes after the first of i, and its last
backward before the last of i:

    W_i = max(B t_i, t_i + 2 c_i + W_{i+1})            step >= W_0 + u_0
    step >= B t_i + u_i                                -> quick_bound()

A schedule that holds k_i microbatches on stage i leaves it idle: between the end of its first
forward and the start of that microbatch's backward lies a way forth and back of 2 c_i + P_i, where
P_i = sum over j > i of (t_j + 2 c_j), filled with k_i - 1 forwards; likewise between the last
forward and its backward with k_i - 1 backwards. Where the two do not overlap (B > k_i), the time
from the first forward to the last backward of stage i is at least

    B t_i + max(0, 2 (2 c_i + P_i) - (k_i - 1) t_i),   k_i - 1 = held (number of stages after i)

A schedule that ends all forwards before it begins the backwards takes at least
sum (t_j + 2 c_j) from i on + (B - 1) t_i. Both are bounded for pipelines whose slowest stage i
has lo <= t_i <= hi, where each stage after it adds 2 (t + 2 c) - held hi. Ranges
of t are split where the bound is least, until it reaches the plan in hand. -> refined_bound()
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from attrs import frozen

from stage_dp.joint_schedules import JointRule
from stage_dp.joint_sweep import Entrance, Space, Sweep
from stage_dp.menu_table import Array

MAX_SPLITS = 24  # two sweeps each; gaps fall little after
CLOSE = 2e-4  # relative distance to the plan at which a bound need not be refined


@frozen(eq=False)
class Bounds:
    """Lower bounds of stages: [sequences, kinds, levels], for one microbatch count B.

    `seconds` t, `busy` of B t + u, `once` of t + u. `crossing` [kinds] one way. `levels`: None
    where all places are alike, else the numbers of stages that a pipeline may have.
    """

    space: Space
    num_microbatches: int
    seconds: Array
    busy: Array
    once: Array
    crossing: Array
    counted: bool
    final: tuple[int, ...] | None = None

    @property
    def spread_crossing(self) -> Array:
        """Return 2 c by kind and state."""
        states = self.space.pool.num_states + 1
        return np.repeat(2 * self.crossing[:, None], states, axis=1)


def quick_bound(bounds: Bounds) -> float:
    """Return the bound for any schedule, seconds (inf: there is no pipeline)."""
    return _there_and_back(bounds, math.inf)


def refined_bound(bounds: Bounds, rule: JointRule, bound: float, target: float) -> float:
    """Return a bound at least as good as `bound`; stops where `target` is proven."""
    if rule.held is None or bound >= target:
        return bound
    values = np.unique(bounds.seconds[np.isfinite(bounds.seconds)])
    # A stage with B t beyond the plan in hand cannot be part of a better one.
    values = values[values <= target / bounds.num_microbatches]
    if not len(values):
        return target
    heap = [(bound, float(values[0]), float(values[-1]))]
    for _ in range(MAX_SPLITS):
        least, low, high = heap[0]
        inside = values[(values >= low) & (values <= high)]
        if least >= target * (1 - CLOSE) or len(inside) < 2:
            break
        heapq.heappop(heap)
        # The bound of a range is as good as the range is narrow: halve by value.
        cut = int(np.searchsorted(inside, (inside[0] + inside[-1]) / 2))
        cut = min(max(cut, 1), len(inside) - 1)
        for part in (inside[:cut], inside[cut:]):
            a, b = float(part[0]), float(part[-1])
            heapq.heappush(heap, (max(least, _ranged(bounds, rule, a, b)), a, b))
    return min(heap[0][0], target) if heap else target


def _there_and_back(bounds: Bounds, high: float) -> float:
    """Return W, with the step seconds of the first stage or the busiest."""
    count = bounds.num_microbatches
    return Sweep(
        bounds.space,
        _within(bounds.seconds, bounds.seconds, high),
        bounds.spread_crossing,
        counted=bounds.counted,
        first=_within(bounds.once, bounds.seconds, high),
        floor=count * bounds.seconds,
        first_floor=bounds.busy,
    ).best(bounds.final)


def _within(weight: Array, seconds: Array, high: float) -> Array:
    return weight if math.isinf(high) else np.where(seconds <= high * (1 + 1e-12), weight, np.inf)


def _ranged(bounds: Bounds, rule: JointRule, low: float, high: float) -> float:
    """Return a bound for pipelines whose slowest stage takes from `low` to `high` seconds."""
    base = _there_and_back(bounds, high)
    if math.isinf(base) or rule.held is None:
        return base
    count, held = bounds.num_microbatches, rule.held
    seconds = _within(bounds.seconds, bounds.seconds, high)
    scale = 1 if rule.all_first else 2
    suffix = Sweep(
        bounds.space,
        scale * seconds - held * high,
        scale * bounds.spread_crossing,
        counted=bounds.counted,
    )
    if not rule.all_first:
        suffix.forget(_overlapping(bounds, held))
    slow = (bounds.seconds >= low * (1 - 1e-12)) & (bounds.seconds <= high * (1 + 1e-12))
    with_idle = Sweep(
        bounds.space,
        seconds,
        bounds.spread_crossing,
        counted=bounds.counted,
        first=_within(bounds.once, bounds.seconds, high),
        entrance=Entrance(
            suffix=suffix,
            weight=np.where(slow, count * bounds.seconds, np.inf),
            first=np.where(slow, bounds.busy, np.inf),
        ),
    ).best(bounds.final)
    return max(base, with_idle)


def _overlapping(bounds: Bounds, held: int) -> Array:
    """Return where B may be no more than the microbatches in flight, so that idle time overlaps:
    [layers + 1, levels, states]."""
    space = bounds.space
    layers = space.num_layers - np.arange(space.num_layers + 1)
    smallest = min(kind.num_devices for kind in space.pool.kinds)
    stages = np.minimum(layers[:, None], space.pool.free[None, :] // smallest)[:, None, :]
    if bounds.counted:
        levels = np.arange(bounds.seconds.shape[2] + 1)
        stages = np.minimum(stages, levels[None, :, None])
    result: Array = held * stages + 1 >= bounds.num_microbatches
    return result
