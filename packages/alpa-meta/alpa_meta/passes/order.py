"""The rewrites of every program and body, in order, each with the reason for its place."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from alpa_meta.compat import ClosedJaxpr
from alpa_meta.passes.batched_loops import with_one_condition
from alpa_meta.passes.live import without_dead
from alpa_meta.passes.lookups import with_batched_lookups
from alpa_meta.passes.mapped_reductions import without_mapped_reductions
from alpa_meta.passes.shifts import with_merged_shifts
from alpa_meta.passes.whole_slices import without_whole_dims


@frozen
class Pass:
    """A rewrite of a flat program, all of its calls inlined, into an equal one."""

    rewrite: Callable[[ClosedJaxpr], ClosedJaxpr]
    reason: str


PASSES: tuple[Pass, ...] = (
    Pass(with_one_condition, "first: what it writes out is rewritten by the others"),
    Pass(without_mapped_reductions, "early: the others know reductions, not collectives"),
    Pass(
        without_whole_dims,
        "before lookups: an index of a dim taken whole is no column that counts places, and would "
        "hide those that are",
    ),
    Pass(with_batched_lookups, "after whole dims left the indices that lookups match"),
    Pass(with_merged_shifts, "any time before dead equations: the cuts that it merges become dead"),
    Pass(without_dead, "last: removes what nobody reads after the rewrites, effects aside"),
)


def rewritten(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program after all passes."""
    for one in PASSES:
        program = one.rewrite(program)
    return program
