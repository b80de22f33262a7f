"""Planning without garbage collections, which would walk a growing program again and again.

Tracing and planning make many objects that live on, and few cycles: each collection visits what
is new, a full one visits all, and next to nothing is freed. For a program of 30,000 equations
collections take a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 10_000_000  # objects, some gigabytes: of a plan that makes more, cycles are freed
_NEVER = 1 << 30
_MOST_LEFT = 1_000_000
"""Objects that plannings may leave before they are freed. GPT (size small) leaves 410,000, 30 MB,
and holds 635, 666, 666, 667, 667, 667, 693, 693 MB when planned again and again. A training step
of two products leaves some thousands, which are not worth a visit to all of a process: of five test
files with 163 plannings, collections in every fourth took 9.8 of 74 CPU s."""
_left = 0
_is_frozen = False


@contextmanager
def collections_paused() -> Iterator[None]:
    """Collect next to nothing inside; the settings of before are put back at the end.

    What was made inside is old then, or the next collection of young objects would visit it all:
    1.5 of 17 CPU seconds for GPT-1.3B on 16 H100. So Python looks at it seldom, and what earlier
    plannings have left is freed here, or each would hold more (`benchmarks/planning_time.py
    --again 9`).
    """
    global _left, _is_frozen
    if _left > _MOST_LEFT:
        gc.collect()
        _left = 0
    before = gc.get_threshold()
    gc.set_threshold(_MANY, _NEVER, _NEVER)
    start = gc.get_count()[0]
    try:
        yield
    finally:
        _left += max(gc.get_count()[0] - start, 0)
        # What the caller froze stays frozen, and is counted once: 20 ms where all modules are.
        _is_frozen = _is_frozen or gc.get_freeze_count() > 0
        if not _is_frozen:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, without a visit
        gc.set_threshold(*before)
