"""What a choice of strategies costs, layer by layer."""

from __future__ import annotations

import numpy as np
from attrs import evolve, frozen

from alpa_meta.intra_op.memory_profile import Peak
from alpa_meta.types import Floats
from cost_model.program import Program


@frozen(eq=False)
class StageCosts:
    """What a choice of strategies costs, per layer: seconds per step, bytes per device."""

    forward: Floats
    backward: Floats
    by_weight: Floats  # the part of `backward` that no other layer waits for
    split: Floats  # more of `backward` where that part is a program of its own
    update: Floats
    state: Floats
    gradients: Floats
    activations: Floats  # of one microbatch
    delayed: Floats  # what one microbatch keeps besides for a delayed backward by weight
    waiting: Floats  # all that it keeps while that waits
    kept: Floats  # what one microbatch keeps between the programs of its slices beyond all these
    transient: Floats  # most temporaries at a time
    floor: Floats  # [layers, 2] least seconds: microbatches, update
    peak: Peak  # of all layers together
    # by how many times launches lengthen `forward` and `backward`; None: they wait for none
    slowed: Floats | None = None

    def launched(self, host: StageCosts, program: Program) -> StageCosts:
        """Return the costs where the host of a program takes as long as `host` says to launch what
        these run on devices: the passes of a layer are longer, its update is not."""
        busy, launches = (one.forward + one.backward for one in (self, host))
        slowed, runs = np.ones(len(busy)), (busy > 0) & np.isfinite(busy)  # what cannot be stays so
        slowed[runs] = program.passes_seconds(busy[runs], launches[runs]) / busy[runs]
        return evolve(
            self,
            forward=slowed * self.forward,
            backward=slowed * self.backward,
            by_weight=slowed * self.by_weight,
            slowed=slowed,
        )
