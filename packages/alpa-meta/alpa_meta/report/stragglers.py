"""Meshes that became slow: found by what their runs took in earlier steps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from alpa_meta.report.step_parts import StepParts

SLOW = 1.8
"""Times its own median, and times what the other meshes are slower by: a worker that has half a
core is at 2, and steps of one machine's meshes vary together, by up to 1.5 on a busy one."""
_IN_A_ROW = 3  # slow steps: one is a pause of the collector or of the disk
_LEAST_HISTORY = 5  # steps before a mesh is judged
_HISTORY = 50


@frozen
class Slow:
    """A mesh that is slow: how many times slower than before, and its share of the step."""

    mesh: int
    times: float
    share: float

    def __str__(self) -> str:
        return (
            f"mesh {self.mesh} takes {self.times:.1f} times as long as before and computes "
            f"{self.share:.0%} of the step; look at its host"
        )


@define
class Stragglers:
    """Watches the steps of a run."""

    _busy: dict[int, deque[float]] = field(factory=dict, init=False)
    _count: dict[int, int] = field(factory=dict, init=False)

    def note(self, parts: Mapping[int, StepParts]) -> list[Slow]:
        """Return the meshes that have been slow in this step and those before it."""
        times = {mesh: self._times(mesh, one.busy) for mesh, one in parts.items()}
        found = []
        for mesh, one in parts.items():
            others = [times[other] for other in times if other != mesh]
            common = max(1.0, min(others, default=1.0))
            is_slow = times[mesh] / common >= SLOW
            self._count[mesh] = self._count.get(mesh, 0) + 1 if is_slow else 0
            if not is_slow:
                history: deque[float] = self._busy.setdefault(mesh, deque(maxlen=_HISTORY))
                history.append(one.busy)
            if self._count[mesh] >= _IN_A_ROW:
                found.append(Slow(mesh, times[mesh], one.busy / one.seconds))
        return found

    def _times(self, mesh: int, busy: float) -> float:
        """Return how many times its median a mesh takes, 1 while there is none."""
        history: Sequence[float] = self._busy.get(mesh, ())
        if len(history) < _LEAST_HISTORY:
            return 1.0
        median = statistics.median(history)
        return busy / median if median > 0 else 1.0
