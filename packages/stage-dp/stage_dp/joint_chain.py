"""Pipelines with all choices made, and their exact step times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from attrs import frozen

from stage_dp.batched_time import batched_step_seconds
from stage_dp.joint_links import Links
from stage_dp.joint_schedules import useful_extras, warmups
from stage_dp.menu_table import (
    ACTIVATION,
    BACKWARD,
    DELAYED,
    FORWARD,
    SPLIT,
    STATE,
    STEP,
    TRANSIENT,
    WAITING,
    WEIGHT,
    Array,
    MenuTable,
)
from stage_dp.schedules import ScheduleRule

MAX_EXTRAS = 64  # ways to share out the microbatches in flight that are tried for one pipeline


@frozen(eq=False)
class StageChoice:
    """A stage with its rows. `columns` [COLUMNS] as in ClassRows."""

    layer_start: int
    layer_stop: int
    mesh: int
    columns: Array
    layout_in: int
    layout_out: int
    rows: tuple[int, ...]

    def at(self, start: int, stop: int) -> StageChoice:
        """Return the same rows for layers start..stop, of the same classes."""
        return StageChoice(
            start, stop, self.mesh, self.columns, self.layout_in, self.layout_out, self.rows
        )

    @property
    def seconds(self) -> float:
        """Return forward plus backward of one microbatch."""
        return float(self.columns[FORWARD] + self.columns[BACKWARD])

    def need(self, in_flight: int, num_delayed: int = 0) -> float:
        """Return bytes per device with `in_flight` microbatches alive, where what the backward by
        weight reads is there for `num_delayed`: all but one of them wait for it."""
        c, waiting = self.columns, max(num_delayed - 1, 0)
        fixed = c[STATE] + c[TRANSIENT] + (num_delayed - waiting) * c[DELAYED]
        return float(fixed + (in_flight - waiting) * c[ACTIVATION] + waiting * c[WAITING])


@frozen(eq=False)
class Scored:
    """A pipeline with its step time."""

    stages: tuple[StageChoice, ...]
    rule: ScheduleRule
    num_microbatches: int
    crossing: tuple[float, ...]  # per boundary
    in_flight: tuple[int, ...]
    step_seconds: float
    num_meshes: int | None = None  # None: one per stage

    def peak_bytes(self) -> tuple[float, ...]:
        """Return the bytes per device that each stage needs."""
        num, delayed = len(self.stages), (0,) * len(self.stages)
        if self.rule.splits_backward:
            least = warmups(self.rule, self.num_microbatches, (), num)
            first = self.rule.least_delayed
            delayed = tuple(first + k - n for k, n in zip(self.in_flight, least, strict=True))
        return tuple(
            s.need(k, d) for s, k, d in zip(self.stages, self.in_flight, delayed, strict=True)
        )


_Priced = tuple[tuple[StageChoice, ...], tuple[float, ...]]  # with the seconds of its boundaries
_Placed = tuple[tuple[StageChoice, ...], tuple[str, ...]]  # with the links of its boundaries


def score(
    chains: Iterable[Sequence[StageChoice]],
    rule: ScheduleRule,
    table: MenuTable,
    links: Links,
    *,
    quick: bool = False,
    limit: float = math.inf,
) -> Scored | None:
    """Return the best of `chains` that can be placed and fits in memory; None if none does.

    `quick`: of the ways to share out microbatches in flight only few are tried. Pipelines that
    cannot take less than `limit` seconds are left out.
    """
    placed: list[_Placed] = []
    for chain in chains:
        stages = tuple(chain)
        meshes = [stage.mesh for stage in stages]
        if links.placed(meshes) is not None:
            placed.append((stages, links.crossed(meshes)))
    most = 1 if quick else MAX_EXTRAS
    if not links.floored:
        priced = [(stages, _crossing(stages, crossed, links, table)) for stages, crossed in placed]
        return _fastest(priced, rule, table, most, limit)
    # Each price of a boundary is a plan of transfers: those of few pipelines are asked for, in the
    # order of what they take with the least that boundaries cost.
    hopes = []
    for stages, crossed in placed:
        floors = tuple(
            links.floor_after(table, a.layer_stop, (a.mesh, b.mesh), link)
            for a, b, link in zip(stages, stages[1:], crossed, strict=False)
        )
        hopes.append((stages, floors))
    seconds = _all_seconds(hopes, rule, table, most, limit)
    order = sorted(range(len(placed)), key=seconds.__getitem__)
    best: Scored | None = None
    first, some = 0, 1
    while first < len(order) and seconds[order[first]] < limit:
        chunk = [placed[n] for n in order[first : first + some] if seconds[n] < limit]
        priced = [(stages, _crossing(stages, crossed, links, table)) for stages, crossed in chunk]
        found = _fastest(priced, rule, table, most, limit)
        if found is not None:
            best, limit = found, found.step_seconds
        first, some = first + some, 2 * some
    return best


def _crossing(
    stages: Sequence[StageChoice], crossed: Sequence[str], links: Links, table: MenuTable
) -> tuple[float, ...]:
    """Return the seconds one way of each boundary."""
    return tuple(
        links.seconds(a.mesh, a.layout_out, b.mesh, b.layout_in, link, table.samples)
        for a, b, link in zip(stages, stages[1:], crossed, strict=False)
    )


def _grouped(
    priced: Sequence[_Priced], rule: ScheduleRule, table: MenuTable, most: int, limit: float
) -> Iterator[tuple[tuple[int, ...], list[int], Array]]:
    """Yield numbers of microbatches in flight, which pipelines run with them, and their seconds,
    of those that may take less than `limit`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (stages, crossing) in enumerate(priced):
        if not all(map(math.isfinite, crossing)):
            continue
        if _least_seconds(stages, crossing, rule, table) >= limit:
            continue
        for held in _in_flight(stages, crossing, rule, table, most):
            groups.setdefault(held, []).append(number)
    for held, members in groups.items():
        figures = np.array([[s.columns for s in priced[n][0]] for n in members])
        backward = figures[:, :, BACKWARD]
        if rule.splits_backward:
            backward = backward + figures[:, :, SPLIT]
        seconds = batched_step_seconds(
            held,
            table.num_microbatches,
            figures[:, :, FORWARD],
            backward,
            np.array([priced[n][1] for n in members]).reshape(len(members), -1),
            figures[:, :, STEP],
            figures[:, :, WEIGHT] if rule.splits_backward else None,
        )
        yield held, members, seconds


def _all_seconds(
    priced: Sequence[_Priced], rule: ScheduleRule, table: MenuTable, most: int, limit: float
) -> list[float]:
    """Return the step time of each pipeline, inf where that is `limit` or more."""
    found = [math.inf] * len(priced)
    for _, members, seconds in _grouped(priced, rule, table, most, limit):
        for number, one in zip(members, seconds.tolist(), strict=True):
            found[number] = min(found[number], one)
    return found


def _fastest(
    priced: Sequence[_Priced], rule: ScheduleRule, table: MenuTable, most: int, limit: float
) -> Scored | None:
    """Return the fastest pipeline with its boundaries priced, None if none takes less than
    `limit`."""
    best: Scored | None = None
    for held, members, seconds in _grouped(priced, rule, table, most, limit):
        at = int(np.argmin(seconds))
        if seconds[at] < (best.step_seconds if best else limit):
            stages, crossing = priced[members[at]]
            count = table.num_microbatches
            best = Scored(stages, rule, count, crossing, held, float(seconds[at]))
    return best


def rows_by_limit(
    options: Sequence[Sequence[StageChoice]],
    links: Links,
    num_microbatches: int,
    samples: int,
) -> list[list[StageChoice]]:
    """Return choices, one of the `options` of each stage, with the least sum of seconds and
    boundaries: any, and those with the slowest stage as fast as it can be.

    Limits between the two found nothing better on layer menus of 24 to 96 layers.
    """

    def slow(choice: StageChoice) -> float:
        return (num_microbatches - 1) * choice.seconds + float(choice.columns[STEP])

    tightest = max(min(map(slow, own)) for own in options)
    fast = [[c for c in own if slow(c) <= tightest] for own in options]
    return [_coupled(some, links, samples) for some in (fast, options)]


def _coupled(
    options: Sequence[Sequence[StageChoice]], links: Links, samples: int
) -> list[StageChoice]:
    """Return one choice per stage with the least sum of seconds and boundaries."""
    if all(len(own) == 1 for own in options):
        return [own[0] for own in options]
    value = np.array([c.seconds for c in options[0]])
    origins = []
    for before, own in itertools.pairwise(options):
        origin, through = zip(
            *(_cheapest(value, before, after, links, samples) for after in own), strict=True
        )
        origins.append(origin)
        value = np.array(through) + np.array([c.seconds for c in own])
    at = int(np.argmin(value))
    result = [options[-1][at]]
    for own, origin in zip(reversed(options[:-1]), reversed(origins), strict=True):
        at = int(origin[at])
        result.append(own[at])
    return result[::-1]


def _cheapest(
    value: Array, before: Sequence[StageChoice], after: StageChoice, links: Links, samples: int
) -> tuple[int, float]:
    """Return the choice before one from which it is reached at the least `value` and boundary, and
    these seconds; the first of several. Boundaries are priced, each a plan of transfers, only where
    a choice may be it.
    """
    best, at = math.inf, 0
    for number in np.argsort(value, kind="stable").tolist():
        if value[number] > best:
            break
        a = before[number]
        least = links.least(a.mesh, a.layout_out, after.mesh, after.layout_in, samples)
        through = float(value[number]) + 2 * least
        if (through, number) < (best, at):
            best, at = through, number
    return at, best


def _least_seconds(
    stages: Sequence[StageChoice], crossing: Sequence[float], rule: ScheduleRule, table: MenuTable
) -> float:
    """Return a bound on the step time: each mesh's work and the way to it."""
    way, least = 0.0, 0.0
    for stage, c in zip(stages, (*crossing, 0.0), strict=True):
        busy = table.num_microbatches * stage.seconds
        if rule.splits_backward:  # the way back may end before the work
            least = max(least, way + busy + float(stage.columns[STEP]))
            way += float(stage.columns[FORWARD]) + c
            continue
        least = max(least, way + busy + float(stages[0].columns[STEP]))
        least = max(least, busy + float(stage.columns[STEP]))
        way += stage.seconds + 2 * c
    if rule.splits_backward:
        return least
    return max(least, way + float(stages[0].columns[STEP]))


def _in_flight(
    stages: Sequence[StageChoice],
    crossing: Sequence[float],
    rule: ScheduleRule,
    table: MenuTable,
    most: int,
) -> list[tuple[int, ...]]:
    """Return the distinct microbatches in flight that fit in memory and may be of use."""
    count, delayed = table.num_microbatches, rule.least_delayed
    num = len(stages)

    def fits(held: tuple[int, ...]) -> bool:
        return all(
            s.need(k, delayed) <= table.memory[s.mesh] for s, k in zip(stages, held, strict=True)
        )

    if not rule.flexible:
        held = warmups(rule, count, (), num)
        if not fits(held):
            return []
        if rule.most_in_flight is not None:
            held = tuple(
                next(
                    k for k in range(most, least - 1, -1) if s.need(k, delayed + k - least) <= room
                )
                for s, least, most, room in zip(
                    stages,
                    held,
                    rule.most_in_flight(num, count),
                    (table.memory[s.mesh] for s in stages),
                    strict=True,
                )
            )
        return [held]
    useful = useful_extras(crossing, [stage.seconds for stage in stages])
    useful = tuple(min(extra, count) for extra in useful)
    if math.prod(extra + 1 for extra in useful) <= most:
        tries = list(itertools.product(*(range(extra + 1) for extra in useful)))
    else:
        tries = _growing(useful, count, rule, fits)
    return list(dict.fromkeys(h for t in tries if fits(h := warmups(rule, count, t, num))))


def _growing(
    useful: tuple[int, ...], count: int, rule: ScheduleRule, fits: Callable[[tuple[int, ...]], bool]
) -> list[tuple[int, ...]]:
    """Return none, all, and what fits when boundaries are given theirs from the last to the first
    and from the first to the last."""
    num = len(useful) + 1
    result = [(0,) * len(useful), useful]
    for order in (range(len(useful)), reversed(range(len(useful)))):
        extras = [0] * len(useful)
        for at in order:
            for extra in range(1, useful[at] + 1):
                trial = [*extras[:at], extra, *extras[at + 1 :]]
                if not fits(warmups(rule, count, trial, num)):
                    break
                extras = trial
        result.append(tuple(extras))
    return result
