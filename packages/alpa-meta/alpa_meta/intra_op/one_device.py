"""The memory of a stage on one device, where there is nothing to choose.

It is that of the stage's selection problem on a mesh of one device, whose operators have one
strategy each. Nothing is priced and no problem is made, which takes most of the time of `build`.
"""

from __future__ import annotations

from typing import NamedTuple

from alpa_interchange import ShardingSpec
from alpa_meta.compat import Atom, Var
from alpa_meta.intra_op.builder import Builder
from alpa_meta.intra_op.memory_profile import MemoryProfile
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.placed_equations import Placed
from alpa_meta.intra_op.stage_problem import Record, Source, StageEqns


class OneDevice(NamedTuple):
    """The memory of a stage, and the times of it at which each equation begins."""

    memory: MemoryProfile
    times: tuple[int, ...]


def memory_on_one_device(stage: StageEqns, costs: MeshCosts) -> OneDevice:
    """Return the memory of a stage on a mesh of one device."""
    builder = _WholeValues(costs, stage, ())
    builder.eqns()
    memory = builder.spans((1,)).profile(stage)
    return OneDevice(memory, tuple(builder.times))


class _WholeValues(Builder):
    """Walks over equations whose values are whole on the only device.

    Copies of state are left out: they are of steps in one program, and bounds are of all plans.
    """

    def _copied(self) -> frozenset[Var]:
        return frozenset()

    def operator(self, one: Placed, scope: dict[Atom, Source]) -> Record:
        results = [
            Source(self.fixed, (ShardingSpec.replicated(len(shape)),), shape, size)
            for shape, size in one.facts.results
        ]
        return Record(self.fixed, (), (), tuple(results))
