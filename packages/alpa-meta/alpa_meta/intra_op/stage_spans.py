"""What a stage holds over time, whatever the number of microbatches in flight."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from alpa_interchange import LogicalMesh
from alpa_meta.intra_op.liveness import KINDS, Span
from alpa_meta.intra_op.memory_profile import Copy, MemoryProfile
from alpa_meta.intra_op.stage_problem import Source


@frozen(eq=False)
class StageSpans:
    """The values of a stage on one mesh and when they live.

    `constants` are there all the time: their kind, and how often they count. `of_others` are kept
    by every other microbatch too: by those that wait for their backward by weight, or by those in
    flight.
    """

    constants: Sequence[tuple[Source, int, int]]
    of_others: Sequence[tuple[Source, bool, int]]
    spans: Sequence[Span]
    copies: Sequence[Copy]
    mesh: LogicalMesh
    num_strategies: Sequence[int]
    num_times: int
    num_others: int  # other sizes at which bytes are known

    def profile(self, in_flight: int, num_delayed: int) -> MemoryProfile:
        """Return the memory with so many microbatches in flight, of which some are delayed."""
        kind, times = KINDS.index("activations"), self.num_times
        held = [Span(source, 0, times, of, count) for source, of, count in self.constants]
        for source, delayed, count in self.of_others:
            others = num_delayed if delayed else in_flight - 1
            if others > 0:
                held.append(Span(source.times(others), 0, times, kind, count))
        return MemoryProfile(
            [*held, *self.spans],
            self.copies,
            self.mesh,
            self.num_strategies,
            times,
            self.num_others,
        )
