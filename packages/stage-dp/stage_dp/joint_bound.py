"""Lower bounds on the step time of every pipeline of one microbatch count and schedule.

Stages 0..n-1 run B microbatches; t_i is the lower bound of stage i's forward plus backward
(-> cell_bounds.py), c_i its crossing one way, u_i its step seconds. For any schedule the mesh of
stage i is busy for B t_i, the first forward of i + 1 comes after the first of i, and its last
backward before the last of i:

    W_i = max(B t_i, t_i + 2 c_i + W_{i+1})            step >= W_0 + u_0
    step >= sum over j < i of (f_j + c_j) + B t_i + u_i    (f_j: the forward)    -> quick_bound()

Between its first forward and its first backward lies the way forth and back of P_i = sum over j > i
of (t_j + 2 c_j), filled with forwards alone, so with the least backward b_i it is also

    step >= sum over j < i of (f_j + c_j) + t_i + 2 c_i + P_i + (B - 1) b_i + u_i

A schedule that holds k_i microbatches on stage i leaves it idle: between the end of its first
forward and the start of that microbatch's backward lies a way forth and back of 2 c_i + P_i, where
P_i = sum over j > i of (t_j + 2 c_j), filled with k_i - 1 forwards; likewise between the last
forward and its backward with k_i - 1 backwards. Where the two do not overlap (B > k_i), the time
from the first forward to the last backward of stage i is at least

    B t_i + max(0, 2 (2 c_i + P_i) - (k_i - 1) t_i),   k_i - 1 = held (number of stages after i)

The first of the two gaps alone is at least 2 c_i + P_i - (k_i - 1) f_i whatever B is, where
f_i <= share t_i and f_i <= t_i - its least backward; that is the better one for schedules that hold
more. "adaptive" holds 1 + ceil(2 c / t) more at each boundary. A schedule that ends all forwards
before it begins the backwards takes at least sum (t_j + 2 c_j) from i on + (B - 1) t_i. All are
bounded for pipelines whose slowest stage i has lo <= t_i <= hi, where each stage after it adds
n (t + 2 c) - held hi with n = 2 gaps, or n = 1 and the largest f_i in place of hi. Ranges of t are
split where the bound is least, until it reaches the plan in hand. -> refined_bound()

Where the backward is split ("zero-bubble-h1"), the parts by weight may run while the last
cotangents go back, so the way counts forwards only, the work of each mesh and its step seconds end
the step, and P counts what is not by weight; the first gap is the only one. After its last backward
by input a mesh has as many parts by weight left as may wait in its memory, d_i, and the last one:
with e_i <= t_i of the forward and the backward by input, in place of W_i there is

    X_i = max((B - 1 - d_i) t_i + (1 + d_i) e_i, e_i + 2 c_i + X_{i+1})

and step >= X_0 + t_0 - e_0 + u_0.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from stage_dp.joint_sweep import Entrance, Space, Sweep, Wait
from stage_dp.joint_window import Window
from stage_dp.menu_table import Array
from stage_dp.schedules import ScheduleRule

MAX_SPLITS = 8  # six sweeps each; gaps fall little after
CLOSE = 2e-4  # relative distance to the plan at which a bound need not be refined


@frozen(eq=False)
class Bounds:
    """Lower bounds of stages: [sequences, kinds, levels], for one microbatch count B.

    `seconds` t, `busy` of B t + u, `once` of t + u. `delayed`: the most backwards by weight that
    wait at once. `crossing` c [layers + 1, kinds, states + 1] by the layer where a stage stops and
    the free devices before it. `levels`: None where all places are alike, else the numbers of
    stages that a pipeline may have. `window`: bounds are of the pipelines in it. `longest` [kinds]:
    the most that a crossing may take; `share` the largest share of a forward in t. `parts`
    [sequences, kinds, 3]: the least forward, forward with backward by input, and backward.
    """

    space: Space
    num_microbatches: int
    seconds: Array
    busy: Array
    once: Array
    delayed: Array
    crossing: Array
    longest: Array
    share: float
    parts: Array
    counted: bool
    open_ended: bool
    final: tuple[int, ...] | None = None
    window: Window | None = None

    def forward(self, within: Array) -> Array:
        """Return the least forward where `within` is finite."""
        return np.where(np.isfinite(within), self.parts[:, :, :1], np.inf)


Chain = list[tuple[int, int, int]]  # (layer start, layer stop, kind) of each stage


def quick_bound(bounds: Bounds, rule: ScheduleRule) -> tuple[float, list[Chain]]:
    """Return the bound, seconds (inf: there is no pipeline), and for each way to count a pipeline
    that takes no more by it; of schedules that do not split the backward it is the same."""
    return _best_of(_there_and_back(bounds, rule, math.inf), bounds)


def refined_bound(
    bounds: Bounds, rule: ScheduleRule, bound: float, target: float
) -> tuple[float, list[Chain]]:
    """Return a bound at least as good as `bound`, and pipelines that take no more by a way to
    count, if some are known; stops where `target` is proven."""
    if bound >= target:
        return bound, []
    values = np.unique(bounds.seconds[np.isfinite(bounds.seconds)])
    # A stage with B t beyond the plan in hand cannot be part of a better one.
    near = values <= target / bounds.num_microbatches
    beyond = bounds.num_microbatches * float(values[~near].min(initial=math.inf))
    values = values[near]
    if not len(values):
        return beyond, []
    heap: list[tuple[float, float, float, list[Sweep]]]
    heap = [(bound, float(values[0]), float(values[-1]), [])]
    for _ in range(MAX_SPLITS):
        least, low, high, _ = heap[0]
        inside = values[(values >= low) & (values <= high)]
        if least >= target * (1 - CLOSE) or len(inside) < 2:
            break
        heapq.heappop(heap)
        # The bound of a range is as good as the range is narrow: halve by value.
        cut = int(np.searchsorted(inside, (inside[0] + inside[-1]) / 2))
        cut = min(max(cut, 1), len(inside) - 1)
        for part in (inside[:cut], inside[cut:]):
            a, b = float(part[0]), float(part[-1])
            sweeps = _ranged(bounds, rule, a, b)
            heapq.heappush(heap, (max(least, sweeps[0].best(bounds.final)), a, b, sweeps))
    least, _, _, lowest = heap[0]
    return min(least, beyond), _best_of(lowest, bounds)[1] if lowest else []


def _best_of(sweeps: Sequence[Sweep], bounds: Bounds) -> tuple[float, list[Chain]]:
    """Return the bound of sweeps, the best one first, and a pipeline of each."""
    value = sweeps[0].best(bounds.final)
    if math.isinf(value):
        return value, []
    return value, [sweep.chain(bounds.final) for sweep in sweeps]


def _there_and_back(bounds: Bounds, rule: ScheduleRule, high: float) -> list[Sweep]:
    """Return the sweeps of W, with the step seconds of the first stage, and of the way there with
    the work and step seconds of the busiest; the larger one first."""
    count = bounds.num_microbatches
    weight = _within(bounds.seconds, bounds.seconds, high)
    there_and_back, work = weight, count * bounds.seconds
    if rule.splits_backward:
        there_and_back = np.where(np.isfinite(weight), bounds.parts[:, :, 1:2], np.inf)
        left = np.minimum(1 + bounds.delayed, count)
        seconds = np.where(np.isfinite(weight), bounds.seconds, 0.0)
        work = (count - left) * seconds + left * there_and_back
    sweep = functools.partial(
        Sweep,
        bounds.space,
        counted=bounds.counted,
        open_ended=bounds.open_ended,
        window=bounds.window,
    )
    way = sweep(there_and_back, 2 * bounds.crossing)
    there = sweep(
        bounds.forward(weight),
        bounds.crossing,
        floor=bounds.busy,
        first_floor=bounds.busy,
        wait=Wait(suffix=way, weight=bounds.once + (count - 1) * bounds.parts[:, :, 2:]),
    )
    back = sweep(
        there_and_back,
        2 * bounds.crossing,
        first=_within(bounds.once, bounds.seconds, high),
        floor=work,
        first_floor=bounds.busy,
    )
    return _largest_first([there, back], bounds)


def _largest_first(sweeps: Sequence[Sweep], bounds: Bounds) -> list[Sweep]:
    return sorted(sweeps, key=lambda sweep: -sweep.best(bounds.final))


def _within(weight: Array, seconds: Array, high: float) -> Array:
    return weight if math.isinf(high) else np.where(seconds <= high * (1 + 1e-12), weight, np.inf)


def _ranged(bounds: Bounds, rule: ScheduleRule, low: float, high: float) -> list[Sweep]:
    """Return the sweeps of pipelines whose slowest stage takes from `low` to `high` seconds, the
    one that says most first."""
    base = _there_and_back(bounds, rule, high)
    if math.isinf(base[0].best(bounds.final)):
        return base
    count = bounds.num_microbatches
    seconds = _within(bounds.seconds, bounds.seconds, high)
    slow = (bounds.seconds >= low * (1 - 1e-12)) & (bounds.seconds <= high * (1 + 1e-12))
    gaps, filled = _gaps(bounds, rule, slow, high)
    split = rule.splits_backward
    there = bounds.parts[:, :, 1:2] if split else bounds.seconds
    suffix = Sweep(
        bounds.space,
        np.where(np.isfinite(seconds), gaps * there - filled, np.inf),
        2 * gaps * bounds.crossing,
        counted=bounds.counted,
        open_ended=bounds.open_ended,
        window=bounds.window,
    )
    if gaps == 2:
        suffix.forget(_overlapping(bounds, rule.held))
    with_idle = Sweep(
        bounds.space,
        bounds.forward(seconds) if split else seconds,
        (1 if split else 2) * bounds.crossing,
        counted=bounds.counted,
        open_ended=bounds.open_ended,
        first=None if split else _within(bounds.once, bounds.seconds, high),
        entrance=Entrance(
            suffix=suffix,
            weight=np.where(slow, bounds.busy if split else count * bounds.seconds, np.inf),
            first=np.where(slow, bounds.busy, np.inf),
        ),
        window=bounds.window,
    )
    return _largest_first([*base, with_idle], bounds)


def _gaps(
    bounds: Bounds, rule: ScheduleRule, slow: NDArray[np.bool_], high: float
) -> tuple[int, Array | float]:
    """Return how many idle gaps count, and the seconds by which the slowest stage, one of `slow`,
    fills them, per stage after it."""
    if rule.all_first:
        return 1, 0.0
    backward = np.broadcast_to(bounds.parts[:, :, 2:], slow.shape)
    forward = float((bounds.seconds[slow] - backward[slow]).max(initial=0.0))
    forward = min(forward, bounds.share * high)
    if rule.flexible:
        with np.errstate(divide="ignore", invalid="ignore"):
            extra = np.ceil(2 * bounds.longest[None, :, None] / bounds.seconds)
        return 1, forward * (1 + np.minimum(extra, bounds.num_microbatches))
    if not rule.splits_backward and 2 * high - rule.held * high > high - rule.held * forward:
        overlapping = _overlapping(bounds, rule.held)
        if not overlapping[0].all():
            return 2, float(rule.held) * high
    return 1, forward * rule.held


def _overlapping(bounds: Bounds, held: int) -> NDArray[np.bool_]:
    """Return where B may be no more than the microbatches in flight, so that idle time overlaps:
    [layers + 1, levels, states]."""
    space = bounds.space
    layers = space.num_layers - np.arange(space.num_layers + 1)
    smallest = min(kind.num_devices for kind in space.pool.kinds)
    stages = np.minimum(layers[:, None], space.pool.free[None, :] // smallest)[:, None, :]
    if bounds.counted:
        levels = np.arange(bounds.seconds.shape[2] + 1)
        if bounds.open_ended:
            levels[-1] = space.num_layers
        stages = np.minimum(stages, levels[None, :, None])
    result: NDArray[np.bool_] = held * stages + 1 >= bounds.num_microbatches
    return result
