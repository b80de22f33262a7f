"""Lower bounds on the step time of every pipeline that can be built from the candidates of a table.

Stages 0..n-1 run B microbatches; t_i is the lower bound of stage i's forward plus backward, c_i its
crossing time one way, u_i its update. For any schedule in which a microbatch goes forth through all
stages and back again, the mesh of stage i is busy for B t_i, and the first forward of i + 1 comes
after the first of i, its last backward before the last of i:

    W_i = max(B t_i, t_i + 2 c_i + W_{i+1})            step >= W_0 + u_0
    V_i = max(B t_i + u_i, c_i + V_{i+1})              step >= V_0     -> quick_bound()

A schedule that splits the backward delays its last part, w_i of t_i (the share that it has of the
candidate's own time), past the last backward by input. In place of W_i there is

    Y_i = max(B (t_i - w_i), t_i - w_i + 2 c_i + Y_{i+1})              step >= Y_0 + w_0 + u_0

and in V_i the forward f_i stands beside c_i.

A schedule that holds k_i microbatches on stage i leaves it idle: between the end of its first
forward and the start of that microbatch's backward lies a way forth and back of 2 c_i + P_i, where
P_i = sum over j > i of (t_j + 2 c_j), filled with k_i - 1 forwards; likewise between the last
forward and its backward with k_i - 1 backwards. Where the two do not overlap (B > k_i), the time
from the first forward to the last backward of stage i is at least

    B t_i + max(0, 2 (2 c_i + P_i) - (k_i - 1) t_i)

with k_i - 1 = n - 1 - i in 1f1b and twice that in eager-1f1b. gpipe ends all forwards before it
begins the backwards, so its step is at least sum_i (t_i + 2 c_i) + (B - 1) max_i t_i. Both are
bounded from below for plans whose slowest stage has lo <= t <= hi: the stage in question
contributes its own t, each stage after it 2 (t + 2c) - hi (twice hi in eager-1f1b). Ranges of t are
split where the bound is least, until it reaches the plan in hand.     -> refined_bound()
"""

from __future__ import annotations

import heapq

import numpy as np

from stage_dp.schedules import SCHEDULE_RULES
from stage_dp.stage_table import Array, Entrance, StageTable, Sweep

MAX_SPLITS = 40
CLOSE = 1e-4  # relative distance at which a bound need not be refined


def quick_bound(table: StageTable) -> float:
    """Return the larger of W and V of the module docstring, seconds (inf: there is no plan)."""
    num = table.num_microbatches
    everything = np.ones(len(table.candidates), dtype=bool)
    crossing = table.crossing
    runs = num if table.schedule == "sequential" else 1

    def least(weight: Array, floor: Array, extra_at_start: Array | None) -> float:
        return Sweep(
            table,
            allowed=everything,
            weight=weight,
            floor=floor,
            extra_at_start=extra_at_start,
            use_memory=False,
        ).best()

    if SCHEDULE_RULES[table.schedule].splits_backward:
        seconds = np.maximum(table.forward + table.backward, 1e-300)
        later = table.least * table.later / seconds
        forward = table.least * table.forward / seconds
        busy = least(forward + crossing, num * table.least + table.update, None)
        early = table.least - later
        return max(busy, least(early + 2 * crossing, num * early, later + table.update))
    with_updates = least(runs * crossing, num * table.least + table.update, None)
    there_and_back = least(runs * (table.least + 2 * crossing), num * table.least, table.update)
    return max(there_and_back, with_updates)


def refined_bound(table: StageTable, bound: float, target: float) -> float:
    """Return a bound at least as good as `bound`; stops where `target` is proven, seconds."""
    held = {"1f1b": 1, "eager-1f1b": 2, "gpipe": 0}
    if table.schedule not in held:
        return bound
    values = np.unique(table.least)
    num = table.num_microbatches
    # A stage with B t beyond the plan in hand cannot be part of a better one.
    high = int(np.searchsorted(values, target / num, side="right")) - 1
    beyond = num * float(values[high + 1]) if high + 1 < len(values) else np.inf
    if high < 0:
        return beyond
    heap = [(bound, 0, high)]
    for _ in range(MAX_SPLITS):
        low_bound, low, high = heap[0]
        if low == high or low_bound >= target * (1 - CLOSE):
            break
        heapq.heappop(heap)
        middle = int(np.searchsorted(values, (values[low] + values[high]) / 2))
        middle = min(max(middle, low), high - 1)
        for a, b in ((low, middle), (middle + 1, high)):
            ranged = _ranged_bound(table, float(values[a]), float(values[b]), held[table.schedule])
            heapq.heappush(heap, (max(low_bound, ranged), a, b))
    return float(min(heap[0][0], beyond))


def _ranged_bound(table: StageTable, low: float, high: float, held: int) -> float:
    """Return a bound for plans whose slowest stage takes from `low` to `high` seconds."""
    num, crossing, least = table.num_microbatches, table.crossing, table.least
    allowed = least <= high
    path = least + 2 * crossing
    gpipe = table.schedule == "gpipe"
    there_and_back = Sweep(
        table,
        allowed=allowed,
        weight=path,
        floor=num * least,
        extra_at_start=table.update,
        use_memory=False,
    ).best()
    if np.isinf(there_and_back):
        return there_and_back
    suffix = Sweep(
        table,
        allowed=allowed,
        weight=path if gpipe else 2 * path - held * high,
        use_memory=False,
    )
    if not gpipe:
        # Where there may be so many stages that B <= k, the idle time is not counted.
        layers = table.problem.num_layers - np.arange(table.problem.num_layers + 1)
        stages = np.minimum(layers[:, None], table.pool.free[None, :] // table.smallest)
        overlapping = held * stages + 1 >= num
        suffix.replace(overlapping, -np.inf)
    with_idle_time = Sweep(
        table,
        allowed=allowed,
        weight=path,
        extra_at_start=table.update,
        use_memory=False,
        entrance=Entrance(
            suffix=suffix,
            mask=allowed & (least >= low),
            weight=num * least,
            crossing=crossing * (2 if gpipe else 4),
        ),
    ).best()
    return max(there_and_back, with_idle_time)
