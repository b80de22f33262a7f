"""How many microbatches a pipeline's stages hold, where the joint search may choose.

"adaptive" holds up to ceil(2 c / t) more than 1f1b at each boundary, as far as memory allows;
"zero-bubble-h1" keeps as many microbatches for a later backward by weight as memory holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stage_dp.schedules import SCHEDULE_RULES, ScheduleRule, extra_in_flight

SEARCHED = tuple(
    name for name, rule in SCHEDULE_RULES.items() if rule.pace is not None or rule.interleaves
)


def warmups(
    rule: ScheduleRule, num_microbatches: int, extras: Sequence[int], num_stages: int
) -> tuple[int, ...]:
    """Return the microbatches in flight of each stage; `extras` [stages - 1] if flexible."""
    if not rule.flexible:
        return tuple(rule.least_at(num_stages - i, num_microbatches) for i in range(num_stages))
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
