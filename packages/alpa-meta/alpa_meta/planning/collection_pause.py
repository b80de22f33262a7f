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
_EVERY = 4  # plannings: what they leave, 30 MB each of GPT (size small), against 0.1 s and more
_plannings = 0


@contextmanager
def collections_paused() -> Iterator[None]:
    """Collect next to nothing inside; the settings of before are put back at the end.

    What was made inside is old then, or the next collection of young objects would visit it all:
    1.5 of 17 CPU seconds for GPT-1.3B on 16 H100. So Python looks at it seldom, and what earlier
    plannings have left is freed here, or each would hold more (`benchmarks/planning_time.py
    --again 9`).
    """
    global _plannings
    _plannings += 1
    if _plannings % _EVERY == 0:
        gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(_MANY, _NEVER, _NEVER)
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what the caller froze stays frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, without a visit
        gc.set_threshold(*before)
