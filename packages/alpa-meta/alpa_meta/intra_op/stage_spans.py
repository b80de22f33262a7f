"""What a stage holds over time, whatever the number of microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from alpa_interchange import LogicalMesh
from alpa_meta.intra_op.liveness import KINDS, Span
from alpa_meta.intra_op.memory_profile import Copy, MemoryProfile
from alpa_meta.intra_op.stage_problem import Source, StageEqns

OTHERS: Mapping[str, Callable[[StageEqns], int]] = {
    "kept": lambda stage: stage.in_flight - 1 - stage.num_delayed,
    "kept late": lambda stage: stage.in_flight - 1,
    "received": lambda stage: stage.in_flight - 1 - stage.num_delayed + stage.num_ahead,
    "received late": lambda stage: stage.in_flight - 1 + stage.num_ahead,
    "read once": lambda stage: stage.num_ahead,
    "returned": lambda stage: stage.num_waiting,
    "delayed": lambda stage: stage.num_delayed,
}
"""How many microbatches hold a value beside the one that runs: one that is kept for the backward
pass, or received for it, by all of it or also by its part by weight ("late"); one that is received
for the forward pass alone; a cotangent that is received; what is kept for a delayed part by weight.
"""


@frozen(eq=False)
class StageSpans:
    """The values of a stage on one mesh and when they live.

    `constants` are there all the time: their kind, and how often they count. `of_others` are kept
    by every other microbatch too, of those of `OTHERS`.
    """

    constants: Sequence[tuple[Source, int, int]]
    of_others: Sequence[tuple[Source, str, int]]
    spans: Sequence[Span]
    copies: Sequence[Copy]
    mesh: LogicalMesh
    num_strategies: Sequence[int]
    num_times: int
    num_others: int  # other sizes at which bytes are known

    def profile(self, stage: StageEqns) -> MemoryProfile:
        """Return the memory with the microbatches in flight of a stage like its own."""
        others = {by: count(stage) for by, count in OTHERS.items()}
        kind, times = KINDS.index("activations"), self.num_times
        held = [Span(source, 0, times, of, count) for source, of, count in self.constants]
        for source, by, count in self.of_others:
            if others[by] > 0:
                held.append(Span(source.times(others[by]), 0, times, kind, count))
        return MemoryProfile(
            [*held, *self.spans],
            self.copies,
            self.mesh,
            self.num_strategies,
            times,
            self.num_others,
        )
