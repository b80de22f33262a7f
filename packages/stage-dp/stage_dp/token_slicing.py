"""Token slicing: cut sequences into slices that flow through a pipeline (TeraPipe).

A unit is a slice of tokens start..stop of b samples; it reads the tokens before it as context. With
K equal stages and units u in order, all forwards before all backwards,

    T = sum_u t_u + (K - 1) max_u t_u      (t_u: forward plus backward of one stage)

For a limit M on t_u the least sum splits: with u(b, i, j) the seconds of tokens i..j of b samples,

    S_b(j) = min over i < j, u(b, i, j) <= M, of S_b(i) + u(b, i, j)         one group of b samples
    g(n)   = min over b <= n of g(n - b) + S_b(length)                       all n samples

The limits are searched by bisection with the bound S(hi) + (K - 1) next limit above lo, as in
stage_construction.py, so no limit is skipped and none is tried that cannot win. -> slice_tokens()

Where stages differ, K is replaced by their total over the slowest one's, the plans met, the uniform
ones among them, are scored by the exact longest path through stages and units, and the best is
improved by moving, adding and removing single cuts. -> flow_seconds(), _improved()

Memory: activations of all units of a round are alive at its end (all forwards come first). Where
the whole batch does not fit it is run in several rounds, as few as fit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from alpa_interchange.check import non_negative, positive
from stage_dp.infeasibility import InfeasibleError

Array = NDArray[np.float64]
PLANS_SCORED = 64
PLANS_TRIED = 400  # by moving cuts, where stages differ


@frozen(kw_only=True)
class TokenProblem:
    """What slices take and keep.

    `seconds` [microbatch sizes, positions, positions]: entry [b - 1, i, j] is the slowest
    stage's forward plus backward seconds for grid cells i..j of b samples (i < j; others are
    ignored).

    A grid cell is `tokens_per_cell` tokens. `stage_scale` [stages]: each stage's seconds relative
    to `seconds`. Bytes are per device: `state_bytes`, `token_bytes` for each token of each sample
    until its backward, `unit_token_bytes` for each token of the unit in work.
    """

    seconds: Array = field(repr=False)
    num_samples: int = field(validator=positive)
    stage_scale: tuple[float, ...]
    tokens_per_cell: int = 1
    step_seconds: float = field(default=0.0, validator=non_negative)  # once per step
    memory: float = math.inf
    state_bytes: float = field(default=0.0, validator=non_negative)
    token_bytes: float = field(default=0.0, validator=non_negative)
    unit_token_bytes: float = field(default=0.0, validator=non_negative)

    def __attrs_post_init__(self) -> None:
        shape = np.shape(self.seconds)
        if len(shape) != 3 or shape[1] != shape[2] or shape[1] < 2 or shape[0] < 1:
            raise ValueError(
                "TokenProblem.seconds must have shape [microbatch sizes, positions, positions] "
                f"with at least 2 positions, got {shape}"
            )
        if not self.stage_scale or min(self.stage_scale) <= 0:
            raise ValueError(f"TokenProblem.stage_scale must be positive, got {self.stage_scale}")

    @property
    def num_cells(self) -> int:
        return int(self.seconds.shape[1]) - 1


@frozen(kw_only=True)
class TokenPlan:
    """Groups of samples in order, each with its slices in tokens; the same in every round.

    `lower_bound` is proven for equal stages; for others it is the trivial bound of the slowest.
    """

    groups: tuple[tuple[int, tuple[int, ...]], ...]  # (samples, tokens of each slice)
    num_rounds: int
    step_seconds: float
    lower_bound: float
    peak_bytes: float


def flow_seconds(times: Array | Sequence[Sequence[float]]) -> float:
    """Return the exact time for units to pass through stages in order: `times` [stages, units].

    The longest path D(k, u) = max(D(k - 1, u), D(k, u - 1)) + t(k, u).
    """
    done = np.zeros(np.shape(times)[1])
    for row in np.asarray(times, dtype=np.float64):
        end = 0.0
        for u, seconds in enumerate(row.tolist()):
            end = max(end, float(done[u])) + seconds
            done[u] = end
    return float(done[-1])


def slice_tokens(problem: TokenProblem) -> TokenPlan:
    """Return the microbatch sizes and token slices with the least step time that fit in memory."""
    num_rounds = _rounds(problem)
    samples = problem.num_samples // num_rounds
    allowed = _allowed_units(problem, samples)
    plans = _search(problem, samples, allowed)
    if not plans:
        raise InfeasibleError(
            f"no unit of tokens fits in memory of {problem.memory:.0f} bytes; use a finer grid",
            missing_bytes=_peak(problem, samples, problem.tokens_per_cell) - problem.memory,
            remedy="a finer grid of tokens",
        )
    plans |= _uniform(problem, samples, allowed)
    scored = sorted(
        (flow_seconds(_times(problem, plan)), len(plan), plan)
        for plan in sorted(plans, key=lambda p: plans[p])[:PLANS_SCORED]
    )
    seconds, _, plan = scored[0]
    equal = max(problem.stage_scale) - min(problem.stage_scale) <= 1e-9 * max(problem.stage_scale)
    if not equal:
        seconds, plan = _improved(problem, seconds, plan, allowed)
    bound = min(plans.values()) if equal else _slowest_alone(problem, samples, allowed)
    largest = max(b * (j - i) for b, i, j in plan) * problem.tokens_per_cell
    return TokenPlan(
        groups=_groups(problem, plan),
        num_rounds=num_rounds,
        step_seconds=num_rounds * seconds + problem.step_seconds,
        lower_bound=num_rounds * min(bound, seconds) + problem.step_seconds,
        peak_bytes=_peak(problem, samples, largest),
    )


Plan = tuple[tuple[int, int, int], ...]  # units (samples, start cell, stop cell) in order


def _peak(problem: TokenProblem, samples: int, unit_tokens: float) -> float:
    length = problem.num_cells * problem.tokens_per_cell
    return (
        problem.state_bytes
        + samples * length * problem.token_bytes
        + unit_tokens * problem.unit_token_bytes
    )


def _rounds(problem: TokenProblem) -> int:
    """Return the fewest equal rounds whose activations fit."""
    for rounds in range(1, problem.num_samples + 1):
        samples = problem.num_samples // rounds
        if problem.num_samples % rounds == 0:
            if _peak(problem, samples, problem.tokens_per_cell) <= problem.memory:
                return rounds
    missing = _peak(problem, 1, problem.tokens_per_cell) - problem.memory
    raise InfeasibleError(
        f"one sample and one grid cell of tokens are {missing:.0f} bytes per device over the "
        "memory; use more stages or devices, or recomputation",
        missing_bytes=missing,
        remedy="more stages or devices, or recomputation",
    )


def _allowed_units(problem: TokenProblem, samples: int) -> NDArray[np.bool_]:
    """Return which units fit: [microbatch sizes, positions, positions]."""
    sizes, positions, _ = problem.seconds.shape
    cells = np.arange(positions)
    length = (cells[None, :] - cells[:, None])[None] * np.arange(1, sizes + 1)[:, None, None]
    tokens = length * problem.tokens_per_cell
    peak = _peak(problem, samples, 0.0) + tokens * problem.unit_token_bytes
    fits: NDArray[np.bool_] = (length > 0) & (peak <= problem.memory)
    fits[samples:] = False
    return fits


def _search(problem: TokenProblem, samples: int, allowed: NDArray[np.bool_]) -> dict[Plan, float]:
    """Return the plans met with their T of the module docstring; the least is the optimum of T."""
    seconds = np.where(allowed, problem.seconds, np.inf)
    limits = np.unique(seconds[np.isfinite(seconds)])
    extra = sum(problem.stage_scale) / max(problem.stage_scale) - 1
    found: dict[Plan, float] = {}
    scale = max(problem.stage_scale)

    def solve(number: int) -> tuple[float, float]:
        plan = _least_sum(seconds, float(limits[number]), samples)
        if plan is None:
            return math.inf, math.inf
        times = np.array([seconds[b - 1, i, j] for b, i, j in plan])
        found[plan] = scale * (float(times.sum()) + extra * float(times.max()))
        return float(times.sum()), float(times.max())

    if not len(limits):
        return {}
    value, slowest = solve(len(limits) - 1)
    if math.isinf(value):
        return {}
    best = value + extra * slowest
    stop = int(np.searchsorted(limits, slowest)) - 1
    heap = [(value + extra * float(limits[0]), 0, stop, value)] if stop >= 0 else []
    while heap:
        bound, low, high, least = heapq.heappop(heap)
        if bound >= best * (1 - 1e-12):
            break
        middle = (low + high) // 2
        value, slowest = solve(middle)
        if not math.isinf(value):
            best = min(best, value + extra * slowest)
            stop = int(np.searchsorted(limits, slowest)) - 1
            if stop >= low:
                heapq.heappush(heap, (value + extra * float(limits[low]), low, stop, value))
        if middle < high:
            heapq.heappush(
                heap, (least + extra * float(limits[middle + 1]), middle + 1, high, least)
            )
    return found


def _least_sum(seconds: Array, limit: float, samples: int) -> Plan | None:
    """Return the units of least total seconds, none above `limit`; None if there are none."""
    sizes, positions, _ = seconds.shape
    usable = np.where(seconds <= limit, seconds, np.inf)
    best = np.full((sizes, positions), np.inf)
    best[:, 0] = 0.0
    origin = np.zeros((sizes, positions), dtype=np.int64)
    for j in range(1, positions):
        through = best[:, :j] + usable[:, :j, j]
        origin[:, j] = through.argmin(axis=1)
        best[:, j] = np.take_along_axis(through, origin[:, j : j + 1], axis=1)[:, 0]
    total = np.full(samples + 1, np.inf)
    total[0] = 0.0
    pick = np.zeros(samples + 1, dtype=np.int64)
    for n in range(1, samples + 1):
        options = total[n - np.arange(1, min(sizes, n) + 1)] + best[: min(sizes, n), -1]
        pick[n] = int(options.argmin()) + 1
        total[n] = options[pick[n] - 1]
    if math.isinf(total[samples]):
        return None
    units: list[tuple[int, int, int]] = []
    left = samples
    while left:
        b = int(pick[left])
        cuts = [positions - 1]
        while cuts[-1]:
            cuts.append(int(origin[b - 1, cuts[-1]]))
        cuts.reverse()
        units.extend((b, i, j) for i, j in zip(cuts, cuts[1:], strict=False))
        left -= b
    return tuple(units)


def _uniform(problem: TokenProblem, samples: int, allowed: NDArray[np.bool_]) -> dict[Plan, float]:
    """Return plans of equal slices for each microbatch size that divides the samples."""
    cells = problem.num_cells
    scale = max(problem.stage_scale)
    extra = sum(problem.stage_scale) / scale - 1
    result: dict[Plan, float] = {}
    for b in range(1, min(samples, problem.seconds.shape[0]) + 1):
        if samples % b:
            continue
        for count in range(1, cells + 1):
            cuts = [round(k * cells / count) for k in range(count + 1)]
            units = [(b, i, j) for i, j in zip(cuts, cuts[1:], strict=False)]
            if all(allowed[b - 1, i, j] for _, i, j in units):
                times = np.array([problem.seconds[b - 1, i, j] for _, i, j in units])
                total = float(times.sum()) * (samples // b) + extra * float(times.max())
                result[tuple(units * (samples // b))] = scale * total
    return result


def _improved(
    problem: TokenProblem, seconds: float, plan: Plan, allowed: NDArray[np.bool_]
) -> tuple[float, Plan]:
    """Return a plan that gains nothing from moving, adding or removing a cut (or trials end)."""
    trials = 0
    while True:
        for other in _neighbours(plan):
            if not all(allowed[b - 1, i, j] for b, i, j in other):
                continue
            trials += 1
            if trials > PLANS_TRIED:
                return seconds, plan
            value = flow_seconds(_times(problem, other))
            if value < seconds * (1 - 1e-12):
                seconds, plan = value, other
                break
        else:
            return seconds, plan


def _neighbours(plan: Plan) -> Iterator[Plan]:
    """Yield the plans that differ in one cut between slices of the same samples."""
    for at, (b, start, stop) in enumerate(plan):
        if stop - start > 1:
            for cut in {start + 1, (start + stop) // 2, stop - 1}:
                yield (*plan[:at], (b, start, cut), (b, cut, stop), *plan[at + 1 :])
        if at + 1 < len(plan) and plan[at + 1][1] == stop:
            last = plan[at + 1][2]
            yield (*plan[:at], (b, start, last), *plan[at + 2 :])
            for cut in (stop - 1, stop + 1):
                if start < cut < last:
                    yield (*plan[:at], (b, start, cut), (b, cut, last), *plan[at + 2 :])


def _slowest_alone(problem: TokenProblem, samples: int, allowed: NDArray[np.bool_]) -> float:
    """Return the least time that the slowest stage needs for its own units."""
    seconds = np.where(allowed, problem.seconds, np.inf)
    plan = _least_sum(seconds, math.inf, samples)
    if plan is None:
        return math.inf
    total = sum(float(seconds[b - 1, i, j]) for b, i, j in plan)
    return total * max(problem.stage_scale)


def _times(problem: TokenProblem, plan: Plan) -> Array:
    unit = np.array([problem.seconds[b - 1, i, j] for b, i, j in plan])
    times: Array = np.asarray(problem.stage_scale)[:, None] * unit[None, :]
    return times


def _groups(problem: TokenProblem, plan: Plan) -> tuple[tuple[int, tuple[int, ...]], ...]:
    groups: list[tuple[int, list[int]]] = []
    for b, i, j in plan:
        if i == 0:
            groups.append((b, []))
        groups[-1][1].append((j - i) * problem.tokens_per_cell)
    return tuple((b, tuple(slices)) for b, slices in groups)
