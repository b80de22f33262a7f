"""Token slicing: cut sequences into slices that flow through a pipeline (TeraPipe).

A unit is a slice of tokens start..stop of b samples; it reads the tokens before it as context. With
K equal stages and units u in order, all forwards before all backwards,

    T = sum_u t_u + (K - 1) max_u t_u      (t_u: forward plus backward of one stage)

For a limit M on t_u the least sum splits: with u(b, i, j) the seconds of tokens i..j of b samples,

    S_b(j) = min over i < j, u(b, i, j) <= M, of S_b(i) + u(b, i, j)         one group of b samples
    g(n)   = min over b <= n of g(n - b) + S_b(length)                       all n samples

The limits are searched by cutting ranges of them, with the bound S(top of the range) + (K - 1)
(least limit in it), so no limit is skipped and none is tried that cannot win. One sweep over the
positions serves many limits. -> _search(), _Sweep

Where stages differ, K is replaced by their total over the slowest one's, the plans met, the uniform
ones among them, are scored by the exact longest path through stages and units, and the best is
improved by moving, adding and removing single cuts. -> flow_seconds(), _improved()

Memory: activations of all units of a round are alive at its end (all forwards come first). Where
the whole batch does not fit it is run in several rounds, as few as fit.
"""

from __future__ import annotations

import heapq
import itertools
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
# Limits that one sweep serves. The eight published cases take 310 CPU ms with 24, 340 with 16, 332
# with 32.
LIMITS_PER_SWEEP = 24
# What a position of a walk takes beside its elements, in elements: 4 us of calls at 2.5 ns each.
# The published 1B setting takes 75 CPU ms with 1,600, 100 with one walk for all sizes.
WALK_ELEMENTS = 1600
UNIFORM_COUNTS = 48  # of equal slices, in geometric steps: every count up to 7


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

    The longest path D(k, u) = max(D(k - 1, u), D(k, u - 1)) + t(k, u); with C(u) the sum of a
    stage's first u units, D(k, u) = C(u) + max over v <= u of D(k - 1, v) - C(v - 1).
    """
    done = np.zeros(np.shape(times)[1])
    for row in np.asarray(times, dtype=np.float64):
        sums = np.cumsum(row)
        done = sums + np.maximum.accumulate(done - (sums - row))
    return float(done[-1])


def slice_tokens(problem: TokenProblem) -> TokenPlan:
    """Return the microbatch sizes and token slices with the least step time that fit in memory."""
    num_rounds = _rounds(problem)
    samples = problem.num_samples // num_rounds
    units = _Units.of(problem, samples)
    plans = _search(problem, units)
    if not plans:
        raise InfeasibleError(
            f"no unit of tokens fits in memory of {problem.memory:.0f} bytes; use a finer grid",
            missing_bytes=_peak(problem, samples, problem.tokens_per_cell) - problem.memory,
            remedy="a finer grid of tokens",
        )
    if max(problem.stage_scale) - min(problem.stage_scale) <= 1e-9 * max(problem.stage_scale):
        plan = min(plans, key=lambda p: (plans[p], len(p), p))
        found = bound = plans[plan]
    else:
        found, _, plan = min(
            (flow_seconds(_times(problem, plan)), len(plan), plan)
            for plan in sorted(plans, key=lambda p: plans[p])[:PLANS_SCORED]
        )
        found, plan = _improved(problem, found, plan, units)
        sizes = np.arange(1, len(units.seconds) + 1)
        least = float(_Sweep.of(units, np.array([math.inf]), sizes).sums[0])
        bound = least * max(problem.stage_scale)
    largest = max(b * (j - i) for b, i, j in plan) * problem.tokens_per_cell
    return TokenPlan(
        groups=_groups(problem, plan),
        num_rounds=num_rounds,
        step_seconds=num_rounds * found + problem.step_seconds,
        lower_bound=num_rounds * bound + problem.step_seconds,
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


@frozen(kw_only=True)
class _Units:
    """Seconds of units [microbatch sizes, start, stop], infinite where a unit does not fit.

    `least` [microbatch sizes, cells]: of the units of 1, 2, ... cells, those of the fastest one.
    """

    seconds: Array
    samples: int
    least: Array

    @classmethod
    def of(cls, problem: TokenProblem, samples: int) -> _Units:
        """Return the units of one round."""
        sizes = min(problem.seconds.shape[0], samples)
        seconds = np.asarray(problem.seconds, dtype=np.float64)[:sizes]
        left = problem.memory - _peak(problem, samples, 0.0)
        cell_bytes = problem.tokens_per_cell * problem.unit_token_bytes
        if left < sizes * problem.num_cells * cell_bytes:
            seconds = seconds.copy()
            cells = np.arange(problem.num_cells + 1)
            for b, of_size in enumerate(seconds, 1):
                of_size[(cells - cells[:, None]) * b * cell_bytes > left] = np.inf
        least = seconds[:, 0, 1:].copy()
        for i in range(1, problem.num_cells):
            shorter = least[:, : problem.num_cells - i]
            np.minimum(shorter, seconds[:, i, i + 1 :], out=shorter)
        return cls(seconds=seconds, samples=samples, least=least)

    def widths(self, limit: float) -> NDArray[np.int64]:
        """Return [microbatch sizes] the most cells of a unit that a limit allows, at least 1."""
        cells = np.arange(1, self.least.shape[1] + 1)
        widths: NDArray[np.int64] = np.where(self.least <= limit, cells, 1).max(axis=1)
        return widths

    def times(self, plan: Plan) -> Array:
        """Return the seconds of each unit of a plan."""
        b, i, j = np.transpose(plan)
        times: Array = self.seconds[b - 1, i, j]
        return times

    def below(self, limit: float) -> Array:
        """Return the seconds below `limit` of all units."""
        ahead = ~np.tri(self.seconds.shape[1], dtype=np.bool_)
        return self.seconds[(self.seconds < limit) & ahead]


def _search(problem: TokenProblem, units: _Units) -> dict[Plan, float]:
    """Return the plans met with their T of the module docstring; the least is the optimum of T.

    The limits still open are kept as pieces: their values, and the least sums for a limit above all
    of them. Each round cuts every piece in several places and sweeps once for all of those limits.
    """
    scale = max(problem.stage_scale)
    extra = sum(problem.stage_scale) / scale - 1
    found: dict[Plan, float] = {}

    def score(plan: Plan) -> float:
        """Note a plan; return its slowest unit."""
        times = units.times(plan)
        slowest = float(times.max())
        if slowest < math.inf:
            found[plan] = scale * float(times.sum() + extra * slowest)
        return slowest

    for plan in _uniform(units, scale, extra):
        score(plan)
    sweep = _Sweep.of(units, np.array([math.inf]), np.arange(1, len(units.seconds) + 1))
    total = float(sweep.sums[0])
    if math.isinf(total):
        return {}
    slowest = score(sweep.plan(0))
    most = (min(found.values()) / scale - total) / extra if extra > 0 else -math.inf
    pieces = [_Piece(units.below(min(slowest, most)), sweep.sums_with(0))]
    while True:
        least = min(found.values()) / scale * (1 - 1e-12)
        pieces = [kept for one in pieces if len((kept := one.below(least, extra)).values)]
        if not pieces:
            return found
        under: list[tuple[float, Array]] = []  # each limit with the values down to the next one
        for piece in pieces:
            above = -math.inf
            for limit in _cuts(piece.values, max(1, LIMITS_PER_SWEEP // len(pieces))).tolist():
                between = (piece.values > above) & (piece.values <= limit)
                under.append((limit, piece.values[between]))
                above = limit
        sizes = 1 + np.flatnonzero(np.isfinite([piece.sums for piece in pieces]).any(axis=0))
        sweep = _Sweep.of(units, np.array([limit for limit, _ in under]), sizes)
        pieces = []
        for q, (total, (_, values)) in enumerate(zip(sweep.sums.tolist(), under, strict=True)):
            if total + extra * float(values.min()) < least:
                # Limits from the slowest unit used up to this one allow the same units.
                values = values[values < score(sweep.plan(q))]
                pieces.append(_Piece(values, sweep.sums_with(q)))


@frozen
class _Piece:
    """Limits still open, and [microbatch sizes] the least sums, for a limit above them all, of
    plans with units of each size; infinite where they cannot win."""

    values: Array
    sums: Array

    def below(self, least: float, extra: float) -> _Piece:
        """Return the limits and sizes whose T may be below `least`."""
        values = self.values[float(self.sums.min()) + extra * self.values < least]
        smallest = float(values.min()) if len(values) else math.inf
        return _Piece(values, np.where(self.sums + extra * smallest < least, self.sums, math.inf))


def _cuts(values: Array, count: int) -> Array:
    """Return up to `count` of the values, in order, that divide them into about equal parts.

    The last is the largest: where the least sums jump below it, by a slice more, it alone shows
    that no value can win.
    """
    drawn = np.sort(values[:: max(1, len(values) // 1024)])
    drawn[-1] = values.max()
    chosen = drawn[np.linspace(0, len(drawn) - 1, count + 1)[1:].round().astype(np.int64)]
    different: Array = chosen[np.append(True, chosen[1:] > chosen[:-1])]
    return different


@frozen(kw_only=True)
class _Sweep:
    """S and g of the module docstring for many limits, by which their plans are found.

    `sizes` [sizes swept]: the samples of their units. `best` [sizes swept, positions, limits],
    `total` [samples + 1, limits].
    """

    units: _Units
    limits: Array
    sizes: NDArray[np.int64]
    width: int  # most cells of a unit that any of the limits allows
    best: Array
    total: Array

    @property
    def sums(self) -> Array:
        """The least sum for each limit; infinite where no units are that fast."""
        sums: Array = self.total[-1]
        return sums

    def sums_with(self, q: int) -> Array:
        """Return [microbatch sizes] the least sum for limit `q` of plans with units of each size;
        infinite for sizes not swept."""
        found = np.full(len(self.units.seconds), np.inf)
        found[self.sizes - 1] = self.best[:, -1, q] + self.total[self.units.samples - self.sizes, q]
        return found

    @classmethod
    def of(cls, units: _Units, limits: Array, sizes: NDArray[np.int64]) -> _Sweep:
        """Return the sweep of all limits and some microbatch sizes at once."""
        widths = units.widths(float(limits.max()))[sizes - 1]
        best = np.full((len(sizes), units.seconds.shape[1], len(limits)), np.inf)
        best[:, 0] = 0.0
        for start, stop in _alike(widths.tolist(), len(limits)):
            width = int(widths[start:stop].max())
            _walk(units.seconds, sizes[start:stop] - 1, limits, width, best[start:stop])
        total = np.full((units.samples + 1, len(limits)), np.inf)
        total[0] = 0.0
        for n in range(int(sizes[0]), units.samples + 1):
            some = sizes[sizes <= n]
            total[n] = (total[n - some] + best[: len(some), -1]).min(axis=0)
        width = int(widths.max())
        return cls(units=units, limits=limits, sizes=sizes, width=width, best=best, total=total)

    def plan(self, q: int) -> Plan:
        """Return the units of the least sum for limit `q`."""
        best, total = self.best[..., q], self.total[:, q]
        plan: list[tuple[int, int, int]] = []
        slices: dict[int, list[tuple[int, int, int]]] = {}
        left = self.units.samples
        while left:
            some = self.sizes[self.sizes <= left]
            at = int((total[left - some] + best[: len(some), -1]).argmin())
            b = int(some[at])
            if b not in slices:
                slices[b] = []
                stop = best.shape[1] - 1
                while stop:
                    low = max(0, stop - self.width)
                    unit = self.units.seconds[b - 1, low:stop, stop]
                    usable = np.where(unit <= self.limits[q], unit, np.inf)
                    start = low + int((best[at, low:stop] + usable).argmin())
                    slices[b].append((b, start, stop))
                    stop = start
                slices[b].reverse()
            plan.extend(slices[b])
            left -= b
        return tuple(plan)


def _alike(widths: Sequence[int], num_limits: int) -> list[tuple[int, int]]:
    """Return stretches of microbatch sizes to walk together, as wide as their widest, in the least
    time."""
    least = [(0.0, 0)]  # for the first sizes: the elements, and where their last stretch starts
    for stop in range(1, len(widths) + 1):
        least.append(
            min(
                (
                    least[start][0]
                    + WALK_ELEMENTS
                    + (stop - start) * max(widths[start:stop]) * num_limits,
                    start,
                )
                for start in range(stop)
            )
        )
    found, stop = [], len(widths)
    while stop:
        found.append((least[stop][1], stop))
        stop = least[stop][1]
    return found


def _walk(seconds: Array, rows: NDArray[np.int64], limits: Array, width: int, best: Array) -> None:
    """Fill `best` [rows, positions, limits], the least sums up to each position with units of
    `rows` of `seconds` and of up to `width` cells; at the first position it is 0."""
    chosen: slice | NDArray[np.int64] = rows
    if len(rows) == rows[-1] - rows[0] + 1:
        chosen = slice(int(rows[0]), int(rows[-1]) + 1)  # a view, not a copy
    unlimited = bool(np.isinf(limits).all())
    for i in range(best.shape[1] - 1):
        unit = seconds[chosen, i, i + 1 : i + 1 + width, None]
        after = best[:, i + 1 : i + 1 + width]
        through = unit + best[:, i, None]
        # Leaving out is a fifth faster than taking the minimum with infinities.
        np.minimum(after, through, out=after, where=True if unlimited else unit <= limits)


def _uniform(units: _Units, scale: float, extra: float) -> list[Plan]:
    """Return the best plans of equal slices for microbatch sizes that divide the samples."""
    sizes, positions, _ = units.seconds.shape
    cells, samples = positions - 1, units.samples
    counts = dict.fromkeys(round(cells ** (k / UNIFORM_COUNTS)) for k in range(UNIFORM_COUNTS + 1))
    divisors = np.array([b for b in range(1, sizes + 1) if samples % b == 0])
    found: list[tuple[float, int, tuple[int, ...]]] = []
    for count in counts:
        cuts = [round(k * cells / count) for k in range(count + 1)]
        times = units.seconds[divisors[:, None] - 1, cuts[:-1], cuts[1:]]
        total = scale * (times.sum(axis=1) * (samples // divisors) + extra * times.max(axis=1))
        found += [(seconds, int(b), tuple(cuts)) for seconds, b in zip(total, divisors)]
    return [
        tuple((b, i, j) for i, j in itertools.pairwise(cuts)) * (samples // b)
        for _, b, cuts in heapq.nsmallest(PLANS_SCORED, found)
    ]


def _improved(problem: TokenProblem, least: float, plan: Plan, units: _Units) -> tuple[float, Plan]:
    """Return a plan that gains nothing from moving, adding or removing a cut (or trials end)."""
    trials = 0
    while True:
        for other in _neighbours(plan):
            if np.isinf(units.times(other)).any():
                continue
            trials += 1
            if trials > PLANS_TRIED:
                return least, plan
            value = flow_seconds(_times(problem, other))
            if value < least * (1 - 1e-12):
                least, plan = value, other
                break
        else:
            return least, plan


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
