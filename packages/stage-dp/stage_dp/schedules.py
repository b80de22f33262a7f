"""Pipeline schedules: in which order each mesh runs the forward and backward of its microbatches.

With n stages, m microbatches and stage i counted from 0, a schedule without interleaving is given
by the *warm-up* k_i: the forwards that stage i runs before its first backward. After that it
alternates backward, forward until the forwards are used up, then runs the remaining backwards. k_i
is also the largest number of microbatches whose activations are alive on stage i.

    sequential        k_i = 1                   one microbatch after the other
    gpipe             k_i = m                   all forwards, then all backwards
    1f1b              k_i = min(m, n - i)       (Narayanan et al., PipeDream-Flush)
    eager-1f1b        k_i = min(m, 2(n-i) - 1)  hides transfers up to half a stage's time
    adaptive          k_i = k_{i+1} + 1 + ceil(2 c_i / t): eager only at slow boundaries
    interleaved-1f1b  several stages per mesh, stage s on mesh s mod p (Megatron-LM)
    zero-bubble-h1    1f1b with the backward in two parts (Qi et al. 2023), see below
    forward-only      the forwards, for inference

zero-bubble-h1 runs the part of a backward that the previous stage waits for (by input) where 1f1b
runs the backward, and the rest (by weight) later: it fills the time in which the first microbatches
come back, and the end. Stage i delays at most d_i = k_i - min(m, n-i) of them, so that k_i
microbatches are alive; at k_i = min(m, n), what 1f1b holds on its first stage, equal stages take
m (f + b + w) + (n-1) (f + b - w) where the three parts take the same time.
-> _delayed()

eager-1f1b and adaptive follow the cross-mesh resharding paper (MLSys'23) and its steady-state law

    period = max over i <= l of ((l-i+1) t + 2 (c_i + ... + c_{l-1})) / (k_i - k_l + 1)

for equal stages of t seconds (forward plus backward) and c_i seconds to cross boundary i one way.
-> implemented in adaptive_warmups()

The searches are guided by sum a_i + max b_i, where for a stage of t = f + b seconds on B
microbatches, c seconds one way to the next stage, u once per step and w by weight (0 where the
backward is not split)

    a = t - 2w + 2c,  b = (B - 1) pace + 2w + u

    schedule                pace
    gpipe                   max(f, c) + max(b, c)
    1f1b, zero-bubble-h1    t + c
    eager-1f1b              max(t, c, (2t + 2c) / 3)
    adaptive                max(t, c)
    sequential              none: a = B (t + 2c), b = u
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from stage_dp.interleaved_order import interleaved_order

NOMINAL_SECONDS = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}
"""By phase: what runs take in `Schedule.global_order`. A backward has twice the products."""

InFlight = Callable[[int, int], tuple[int, ...]]
"""From the numbers of stages and microbatches to the microbatches in flight on each stage."""

Times = NDArray[np.float64]
Pace = Callable[[Times, Times, Times], Times]
"""From the seconds of a forward, a backward and a crossing to those between microbatches."""


@frozen(kw_only=True)
class ScheduleRule:
    """What the searches, the emission and the options need to know of a schedule.

    `in_flight` is the least that the schedule runs with (None: it depends on times, or on how many
    stages a mesh runs), `most_in_flight` what it can make use of where that is more. `pace` guides
    the searches (None: no pipeline is searched by it). `held`: forwards that a stage runs between
    its first forward and that microbatch's backward, for each stage after it.
    """

    name: str
    in_flight: InFlight | None
    most_in_flight: InFlight | None = None
    pace: Pace | None = None
    held: int = 0
    splits_backward: bool = False  # backward_input and backward_weight in place of backward
    has_backward: bool = True
    interleaves: bool = False  # a mesh runs several stages (chunks)
    receives_early: bool = False  # transfers are received before the run that waits for them

    @property
    def flexible(self) -> bool:
        """Return whether stages before slow boundaries may hold more microbatches."""
        return self.in_flight is None and not self.interleaves

    @property
    def least_delayed(self) -> int:
        """Return for how many microbatches at least a stage holds what its backward by weight
        reads: that is a program of its own, whose operands all lie there from the start."""
        return int(self.splits_backward)

    @property
    def all_first(self) -> bool:
        """Return whether all forwards come before the backwards."""
        return self.least_at(1, 1 << 20) == 1 << 20

    def least_at(self, place: int, num_microbatches: int) -> int:
        """Return the least microbatches in flight on a stage; the last stage is at place 1."""
        if self.in_flight is None:
            return 1 if self.interleaves else min(num_microbatches, place)
        return self.in_flight(place, num_microbatches)[0]


def _one_per_stage_to_come(n: int, m: int) -> tuple[int, ...]:
    return tuple(min(m, n - i) for i in range(n))


def _as_1f1b(f: Times, b: Times, c: Times) -> Times:
    return f + b + c


SCHEDULE_RULES: Mapping[str, ScheduleRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            ScheduleRule(name="sequential", in_flight=lambda n, m: (1,) * n),
            ScheduleRule(
                name="gpipe",
                in_flight=lambda n, m: (m,) * n,
                pace=lambda f, b, c: np.maximum(f, c) + np.maximum(b, c),
            ),
            ScheduleRule(name="1f1b", in_flight=_one_per_stage_to_come, pace=_as_1f1b, held=1),
            ScheduleRule(
                name="eager-1f1b",
                in_flight=lambda n, m: tuple(min(m, 2 * (n - i) - 1) for i in range(n)),
                pace=lambda f, b, c: np.maximum(np.maximum(f + b, c), (f + b + c) * (2 / 3)),
                held=2,
                receives_early=True,
            ),
            ScheduleRule(
                name="adaptive",
                in_flight=None,
                pace=lambda f, b, c: np.maximum(f + b, c),
                held=1,
                receives_early=True,
            ),
            ScheduleRule(name="interleaved-1f1b", in_flight=None, interleaves=True),
            ScheduleRule(
                name="zero-bubble-h1",
                in_flight=_one_per_stage_to_come,
                most_in_flight=lambda n, m: (min(m, n),) * n,
                pace=_as_1f1b,
                held=1,
                splits_backward=True,
            ),
            ScheduleRule(name="forward-only", in_flight=lambda n, m: (1,) * n, has_backward=False),
        )
    }
)
SCHEDULES = tuple(SCHEDULE_RULES)


def rule_in_slices(rule: ScheduleRule, num_slices: int) -> ScheduleRule:
    """Return the rule of a schedule for token slices counted as microbatches: `num_slices` of them
    are in flight for each microbatch, and transfers of one are hidden by the next."""
    in_flight = rule.in_flight
    if num_slices == 1 or in_flight is None:
        return rule

    def slices(n: int, m: int) -> tuple[int, ...]:
        return tuple(num_slices * k for k in in_flight(n, m // num_slices))

    pace = SCHEDULE_RULES["gpipe"].pace
    return evolve(rule, in_flight=slices, pace=pace, held=num_slices * rule.held)


@frozen(kw_only=True)
class Step:
    """One run of one stage: its phase, microbatch and token slice.

    The phase is "forward" or "backward", where the backward is split "backward_input" (what the
    previous stage waits for) and "backward_weight" (the rest).
    """

    phase: str
    stage: int
    microbatch: int
    slice_index: int = 0


@frozen(kw_only=True)
class Schedule:
    """The order of steps on each mesh. `steps[mesh]` runs from first to last."""

    name: str
    num_stages: int
    num_microbatches: int
    steps: tuple[tuple[Step, ...], ...]
    num_slices: int = 1  # of the tokens of every microbatch

    @property
    def num_meshes(self) -> int:
        return len(self.steps)

    def mesh_of(self, stage: int) -> int:
        """Return the mesh that runs `stage`."""
        return stage % self.num_meshes

    def in_flight(self, stage: int) -> int:
        """Return the most microbatches of `stage` whose activations are alive at one time."""
        if not SCHEDULE_RULES[self.name].has_backward:
            return 1
        change = {"forward": 1, "backward": -1, "backward_input": 0, "backward_weight": -1}
        alive = peak = 0
        for step in self.steps[self.mesh_of(stage)]:
            if step.stage == stage and step.slice_index == 0:  # begun first, ended last
                alive += change[step.phase]
                peak = max(peak, alive)
        return peak

    def global_order(self) -> tuple[Step, ...]:
        """Return all steps in the order of their start when forward takes 1 s and backward 2 s
        (or 1 s for each of its parts).

        Every step comes after the steps it depends on, so a schedule that has such an order cannot
        wait for itself. Raises ValueError for one that can.
        """
        started, stuck = self._executed
        if stuck:
            raise ValueError(
                f"schedule {self.name!r} waits for itself: every mesh is stuck, at {stuck}"
            )
        return started

    @cached_property
    def _executed(self) -> tuple[tuple[Step, ...], list[Step]]:
        """Return the steps that can run, by start time, and the step each stuck mesh waits at."""
        finish: dict[Step, float] = {}
        clock = [0.0] * self.num_meshes
        position = [0] * self.num_meshes
        started: list[tuple[float, int, Step]] = []
        moved = True
        while moved:
            moved = False
            for mesh, steps in enumerate(self.steps):
                while position[mesh] < len(steps):
                    step = steps[position[mesh]]
                    before = dependencies(step, self.num_stages)
                    if any(other not in finish for other in before):
                        break
                    start = max([clock[mesh], *(finish[other] for other in before)])
                    clock[mesh] = start + NOMINAL_SECONDS[step.phase]
                    finish[step] = clock[mesh]
                    started.append((start, mesh, step))
                    position[mesh] += 1
                    moved = True
        stuck = [
            steps[at] for at, steps in zip(position, self.steps, strict=True) if at < len(steps)
        ]
        started.sort(key=lambda item: item[:2])
        return tuple(step for _, _, step in started), stuck


def dependencies(step: Step, num_stages: int) -> tuple[Step, ...]:
    """Return the steps of other stages, or of the same microbatch, that `step` reads from."""

    def other(phase: str, stage: int) -> Step:  # `evolve` takes 1.4 times as long
        return Step(
            phase=phase, stage=stage, microbatch=step.microbatch, slice_index=step.slice_index
        )

    if step.phase == "forward":
        return () if step.stage == 0 else (other("forward", step.stage - 1),)
    if step.phase == "backward_weight":
        return (other("backward_input", step.stage),)
    own = other("forward", step.stage)
    if step.stage == num_stages - 1:
        return (own,)
    return (own, other(step.phase, step.stage + 1))


def order(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_meshes: int | None = None,
    warmups: Sequence[int] | None = None,
    num_slices: int = 1,
) -> Schedule:
    """Return the schedule called `name`.

    Where microbatches are cut into `num_slices` token slices, a stage runs the forwards of all
    slices of a microbatch in order, and their backwards in reverse, in place of the microbatch's
    (TeraPipe, section 3.1): the next stage starts with the first slice.
    `num_meshes` is for "interleaved-1f1b" (a divisor of `num_stages`); elsewhere each stage has its
    own mesh. `warmups` [num_stages] is needed by "adaptive" (from `adaptive_warmups`, or
    `StagePlan.in_flight`) and replaces the rule of the other schedules where given; for
    "zero-bubble-h1" it is the microbatches in flight, by default as many as it can use.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {name!r}")
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            "a schedule needs at least one stage and one microbatch, got "
            f"num_stages={num_stages}, num_microbatches={num_microbatches}"
        )
    rule = SCHEDULE_RULES[name]
    if num_slices > 1:
        plain = order(name, num_stages, num_microbatches, num_meshes=num_meshes, warmups=warmups)
        return _sliced(plain, num_slices)
    if rule.interleaves:
        if warmups is not None:
            raise ValueError("schedule 'interleaved-1f1b' has its own warm-up; leave out `warmups`")
        return _interleaved(num_stages, num_microbatches, num_meshes or num_stages)
    if num_meshes not in (None, num_stages):
        raise ValueError(
            f"schedule {name!r} runs one stage per mesh, got {num_stages} stages on {num_meshes} "
            "meshes; use 'interleaved-1f1b' for several stages per mesh"
        )
    if warmups is None:
        given = rule.most_in_flight
        warmups = (
            given(num_stages, num_microbatches)
            if given
            else default_warmups(name, num_stages, num_microbatches)
        )
    _check_warmups(rule, warmups, num_stages, num_microbatches)
    steps = tuple(
        _order_of(rule, stage, num_stages, min(warmup, num_microbatches), num_microbatches)
        for stage, warmup in enumerate(warmups)
    )
    return Schedule(
        name=name, num_stages=num_stages, num_microbatches=num_microbatches, steps=steps
    )


def _sliced(schedule: Schedule, num_slices: int) -> Schedule:
    """Return a schedule with the token slices of each microbatch in its place."""

    def slices(step: Step) -> Iterator[Step]:
        forward = step.phase == "forward"
        for k in range(num_slices) if forward else reversed(range(num_slices)):
            yield evolve(step, slice_index=k)

    steps = tuple(tuple(one for step in mesh for one in slices(step)) for mesh in schedule.steps)
    return evolve(schedule, steps=steps, num_slices=num_slices)


def default_warmups(name: str, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the least microbatches in flight on each stage: [num_stages]."""
    rule = SCHEDULE_RULES[name]
    if rule.in_flight is not None:
        return rule.in_flight(num_stages, num_microbatches)
    if not rule.interleaves:
        raise ValueError(
            "schedule 'adaptive' depends on times; pass warmups=adaptive_warmups(...) or the "
            "plan's in_flight"
        )
    raise ValueError(f"schedule {name!r} has no warm-up per stage; ask order(...).in_flight(stage)")


def adaptive_warmups(
    boundary_seconds: Sequence[float],
    stage_seconds: float,
    num_microbatches: int,
    *,
    tolerance: float = 0.0,
) -> tuple[int, ...]:
    """Return the smallest warm-ups that hide each boundary's transfers: [len(boundary_seconds) +
    1].

    `boundary_seconds[i]` is the one-way time from stage i to i + 1, `stage_seconds` the forward
    plus backward time of the slowest stage. `tolerance` lets that fraction of a stage's time stay
    unhidden per boundary, which saves a microbatch in flight where it just misses.
    """
    if not stage_seconds > 0:
        raise ValueError(f"stage_seconds must be above 0, got {stage_seconds!r}")
    warmups = [1]
    for seconds in reversed(boundary_seconds):
        warmups.append(warmups[-1] + 1 + extra_in_flight(seconds, stage_seconds, tolerance))
    return tuple(min(num_microbatches, warmup) for warmup in reversed(warmups))


def extra_in_flight(boundary: float, stage_seconds: float, tolerance: float = 0.0) -> int:
    """Return how many microbatches beyond 1f1b hide a transfer of `boundary` seconds one way."""
    return max(0, math.ceil(min(2 * boundary / stage_seconds, 1e6) - tolerance - 1e-9))


def _check_warmups(
    rule: ScheduleRule, warmups: Sequence[int], num_stages: int, num_microbatches: int
) -> None:
    if len(warmups) != num_stages:
        raise ValueError(f"warmups needs one entry per stage: {num_stages}, got {list(warmups)}")
    if min(warmups) < 1:
        raise ValueError(f"every warm-up must be at least 1, got {list(warmups)}")
    if rule.splits_backward:
        least = default_warmups(rule.name, num_stages, num_microbatches)
        if any(k < needed for k, needed in zip(warmups, least, strict=True)):
            raise ValueError(
                f"schedule {rule.name!r} needs at least {list(least)} microbatches in flight, got "
                f"{list(warmups)}"
            )
        return
    for stage, (this, following) in enumerate(zip(warmups, warmups[1:], strict=False)):
        if this < following:
            raise ValueError(
                f"schedule {rule.name!r}: warm-up of stage {stage} is {this}, below the "
                f"{following} of the next stage, which would wait for forwards that never come; "
                "make it as large"
            )


def _order_of(
    rule: ScheduleRule, stage: int, num_stages: int, in_flight: int, num_microbatches: int
) -> tuple[Step, ...]:
    if not rule.has_backward:
        return tuple(
            Step(phase="forward", stage=stage, microbatch=m) for m in range(num_microbatches)
        )
    if rule.splits_backward:
        warmup = min(num_stages - stage, num_microbatches)
        return _delayed(stage, warmup, in_flight - warmup, num_microbatches)
    return _alternating(stage, in_flight, num_microbatches)


def _delayed(stage: int, warmup: int, delay: int, num_microbatches: int) -> tuple[Step, ...]:
    """Return `_alternating` with split backwards, each part by weight `delay` microbatches late."""
    steps: list[Step] = []
    for step in _alternating(stage, warmup, num_microbatches):
        if step.phase == "forward":
            steps.append(step)
            continue
        m = step.microbatch
        steps.append(Step(phase="backward_input", stage=stage, microbatch=m))
        if m >= delay:
            steps.append(Step(phase="backward_weight", stage=stage, microbatch=m - delay))
    first_left = max(0, num_microbatches - delay)
    steps += [
        Step(phase="backward_weight", stage=stage, microbatch=m)
        for m in range(first_left, num_microbatches)
    ]
    return tuple(steps)


def _alternating(stage: int, warmup: int, num_microbatches: int) -> tuple[Step, ...]:
    steps = [Step(phase="forward", stage=stage, microbatch=m) for m in range(warmup)]
    for m in range(num_microbatches):
        steps.append(Step(phase="backward", stage=stage, microbatch=m))
        if warmup + m < num_microbatches:
            steps.append(Step(phase="forward", stage=stage, microbatch=warmup + m))
    return tuple(steps)


def _interleaved(num_stages: int, num_microbatches: int, num_meshes: int) -> Schedule:
    """Return Megatron's interleaved order (-> interleaved_order.py)."""
    if num_stages % num_meshes:
        raise ValueError(
            f"interleaved-1f1b needs num_stages to be a multiple of num_meshes, got {num_stages} "
            f"stages on {num_meshes} meshes"
        )
    found = interleaved_order(num_meshes, num_stages // num_meshes, num_microbatches)
    microbatches = found.microbatch.tolist()
    steps = []
    for mesh in range(num_meshes):
        runs = []
        for phase, chunks, places in zip(
            ("forward", "backward"), (found.chunk, found.back), found.places(mesh), strict=True
        ):
            stages = (chunks * num_meshes + mesh).tolist()
            runs += [
                (at, Step(phase=phase, stage=stage, microbatch=m))
                for at, stage, m in zip(places.tolist(), stages, microbatches, strict=True)
            ]
        steps.append(tuple(step for _, step in sorted(runs, key=lambda run: run[0])))
    return Schedule(
        name="interleaved-1f1b",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        steps=tuple(steps),
    )
