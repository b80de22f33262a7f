"""Waiting, now and then, for host devices, which deadlock when too many runs are under way.

jax starts a run on several host devices from a pool of as many threads as there are devices. A
device takes 32 runs; the start of one more waits in the pool until an earlier run of the device is
done. When that earlier run holds collectives and has not got its own threads yet, they are gone,
and nothing moves again (XLA then ends the process after 40 s). Steps that are issued without
waiting for their results get there within seconds on a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

RUNS_UNDER_WAY = 4
"""Runs of a mesh of host devices after which the next waits: few beside 32, since what the caller
computes from the results is under way on the same devices; waiting every fourth time costs nothing
that can be measured."""


class Pace:
    """Counts the runs of one mesh and waits for every fourth where its devices are host devices."""

    def __init__(self, mesh: Mesh) -> None:
        self._waits = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._runs = 0

    def issued(self, results: Sequence[jax.Array]) -> None:
        """Take note of a run by its `results`, and wait for them if it is time."""
        if not self._waits:
            return
        self._runs += 1
        if self._runs == RUNS_UNDER_WAY:
            self._runs = 0
            jax.block_until_ready(results)
