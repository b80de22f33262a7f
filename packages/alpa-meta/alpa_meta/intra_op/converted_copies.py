"""The copies of values that are converted to the specs of their readers, and when they live.

A copy is made when its reader runs, and lives until the reader is done with it. XLA for CPUs
computes once what a program asks for twice: a value that several readers want in one spec is
converted for the first of them and held until the last. So a parameter in pieces is whole from the
forward pass to the backward pass (XLA for GPUs gathers it for each anew; read off the buffers of
vit and llama on four host devices, `benchmarks/memory_corpus.py --cluster host:4`).
-> Copy.one_of, MemoryProfile
"""

from __future__ import annotations

import numpy as np
from attrs import define, evolve, field

from alpa_interchange import ShardingSpec
from alpa_meta.compat import Var
from alpa_meta.intra_op.layouts import Layouts
from alpa_meta.intra_op.liveness import PHASES, Timeline
from alpa_meta.intra_op.memory_profile import Copy
from alpa_meta.intra_op.stage_problem import Source, StageEqns
from alpa_meta.types import Floats, HostArray, Ints


@define(eq=False)
class ConvertedCopies:
    """The copies `made` for the equations walked over, by when they are made."""

    layouts: Layouts
    stage: StageEqns
    timeline: Timeline
    made: list[Copy] = field(factory=list)
    of_shared_reads: dict[Var, int] = field(factory=dict)  # places in `made`
    _shared: dict[tuple[Source, int], int] = field(factory=dict)

    def add(
        self,
        source: Source,
        node: int,
        bytes: Floats,
        wanted: tuple[ShardingSpec, ...] = (),
    ) -> None:
        """Note a copy of a value, of [its strategies, those of its reader] bytes, for the equation
        walked over; where it is read as it is there, in the specs `wanted` under those of the
        reader, other readers may read it too."""
        assert source.node is not None
        now = self.timeline.now
        ratios = tuple([size / max(source.bytes, 1.0) for size in source.other_bytes])
        copy = Copy(now, now + 1, source.node, node, bytes, ratios)
        if wanted and self.timeline.on_host:
            program = source, self._program()
            copy = evolve(
                copy,
                one_of=self._shared.setdefault(program, len(self._shared)),
                specs=self._numbers(wanted),
            )
        self.made.append(copy)

    def hold(self, number: int) -> None:
        """Note that a copy lives until now."""
        self.made[number] = evolve(self.made[number], stop=self.timeline.now + 1)

    def note_shared_read(self, result: Var, since: int) -> None:
        """Note that the first of the copies made `since` then is what reads of `result` read."""
        self.of_shared_reads.pop(result, None)  # a body may be walked over more than once
        if len(self.made) > since:
            self.of_shared_reads[result] = since

    def hold_read(self, reads: tuple[Var, ...]) -> None:
        """Note that these values are read, some of which may be copies for several readers."""
        for var in reads:
            if var in self.of_shared_reads:
                self.hold(self.of_shared_reads[var])

    def end_loop(self, began: int) -> None:
        """Note that what was converted for a loop lived until its end."""
        for number in range(len(self.made) - 1, -1, -1):
            if self.made[number].start < began:
                break
            if self.made[number].start == began:
                self.hold(number)

    def _program(self) -> int:
        """Return which of the stage's programs runs the equation walked over."""
        if self.stage.is_whole_step:
            return 0
        if self.stage.kept:
            return self.timeline.phase
        return int(self.timeline.phase == PHASES.index("update"))

    def _numbers(self, specs: tuple[ShardingSpec, ...]) -> Ints:
        layouts = self.layouts

        def make() -> Ints:
            numbers: HostArray = np.array([layouts.number(one) for one in specs], dtype=np.int64)
            return numbers

        return layouts.once(("numbers", layouts.number(specs)), make)
