"""What the joint search knows of each schedule. To add a schedule, add one entry to `RULES`.

Stages are counted from the last: the stage at *place* 1 is the last one. With t = f + b seconds of
a stage per microbatch, c seconds one way to the next stage and B microbatches, the search is guided
by sum a_i + max b_i with

    schedule     in flight       a        pace (b = (B - 1) pace + u)
    gpipe        B               t + 2c   max(f, c) + max(b, c)
    1f1b         min(B, v)       t + 2c   t + c
    eager-1f1b   min(B, 2v - 1)  t + 2c   max(t, c, (2t + 2c) / 3)
    adaptive     as 1f1b         t + 2c   max(t, c)

where "adaptive" holds up to ceil(2 c / t) more at each boundary, as far as memory allows. Plans are
scored by the exact longest path; the guide only says which to look at.

The lower bounds use `held`: the stage at place v runs `held` (v - 1) forwards between its first
forward and that microbatch's backward (0 with `all_first`: all forwards come before the backwards,
which the bounds treat apart). -> joint_bound.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from stage_dp.schedules import extra_in_flight

Array = NDArray[np.float64]
Pace = Callable[[Array, Array, Array], Array]


@frozen(kw_only=True)
class JointRule:
    """One schedule: microbatches in flight by place, pace of a stage, and what bounds may use."""

    name: str
    in_flight: Callable[[int, int], int]  # (place, microbatches)
    pace: Pace  # (forward, backward, crossing) -> seconds per microbatch
    held: int  # of a flexible rule: without what it holds for slow boundaries
    all_first: bool = False
    flexible: bool = False  # may hold more at slow boundaries


RULES: Mapping[str, JointRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            JointRule(
                name="gpipe",
                in_flight=lambda place, count: count,
                pace=lambda f, b, c: np.maximum(f, c) + np.maximum(b, c),
                held=0,
                all_first=True,
            ),
            JointRule(
                name="1f1b",
                in_flight=lambda place, count: min(count, place),
                pace=lambda f, b, c: f + b + c,
                held=1,
            ),
            JointRule(
                name="eager-1f1b",
                in_flight=lambda place, count: min(count, 2 * place - 1),
                pace=lambda f, b, c: np.maximum(np.maximum(f + b, c), (f + b + c) * (2 / 3)),
                held=2,
            ),
            JointRule(
                name="adaptive",
                in_flight=lambda place, count: min(count, place),
                pace=lambda f, b, c: np.maximum(f + b, c),
                held=1,
                flexible=True,
            ),
        )
    }
)


def warmups(
    rule: JointRule, num_microbatches: int, extras: Sequence[int], num_stages: int
) -> tuple[int, ...]:
    """Return the microbatches in flight of each stage; `extras` [stages - 1] if flexible."""
    if not rule.flexible:
        return tuple(rule.in_flight(num_stages - i, num_microbatches) for i in range(num_stages))
    counts = [1]
    for extra in reversed(extras):
        counts.append(counts[-1] + 1 + extra)
    return tuple(min(num_microbatches, count) for count in reversed(counts))


def useful_extras(crossing: Sequence[float], seconds: Sequence[float]) -> tuple[int, ...]:
    """Return how many more microbatches hide each boundary: [stages - 1]."""
    return tuple(
        extra_in_flight(c, t) if t > 0 and math.isfinite(c) else 0
        for c, t in zip(crossing, seconds, strict=False)
    )
