"""The rewrites of a program into an equal one, in order, each with the reason for its place.

Between them a program is classified and cut into microbatches (`step.program`), so that each is of
a moment:

    inlined     all calls are inlined, of the program and of every body in it (`step.trace`)
    classified  each equation has its phase
    cut         the program is that of one microbatch; left out where the batch is taken whole
    planned     nothing else will change the program before it is planned
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from attrs import field, frozen
from attrs.validators import in_

from alpa_meta.operators.rewrites import (
    ALL_PLACES,
    BATCHED_LOOKUPS,
    BLOCKS_OF_RECOMPUTATIONS,
    KNOWN_PLACES,
    MAPPED_REDUCTIONS,
    MERGED_SHIFTS,
    PICKED_BLOCKS,
    SUMMED_PRODUCTS,
    WHOLE_SLICES,
    Rewrite,
    with_rewrite,
)
from alpa_meta.passes.batched_loops import with_one_condition
from alpa_meta.passes.flat_program import FlatProgram, on_equations
from alpa_meta.passes.live import without_dead
from alpa_meta.passes.normalisation import with_constants_in_update, without_markers
from alpa_meta.passes.shared_reads import with_shared_reads

MOMENTS = ("inlined", "classified", "cut", "planned")


@frozen
class Pass:
    """A rewrite of a flat program into an equal one."""

    moment: str = field(validator=in_(MOMENTS))
    rewrite: Callable[[FlatProgram], FlatProgram]
    reason: str


def _pattern(rewrite: Rewrite) -> Callable[[FlatProgram], FlatProgram]:
    return on_equations(functools.partial(with_rewrite, rewrite=rewrite))


PASSES: tuple[Pass, ...] = (
    Pass(
        "inlined",
        on_equations(with_one_condition),
        "first: what it writes out is rewritten by the others",
    ),
    Pass(
        "inlined",
        _pattern(MAPPED_REDUCTIONS),
        "early: the others know reductions, not collectives",
    ),
    Pass(
        "inlined",
        _pattern(WHOLE_SLICES),
        "before lookups: an index of a dim taken whole is no column that counts places, and would "
        "hide those that are",
    ),
    Pass(
        "inlined",
        _pattern(ALL_PLACES),
        "after whole dims left the index that matters; before lookups, which would take its dim "
        "for one of a batch",
    ),
    Pass(
        "inlined",
        _pattern(BATCHED_LOOKUPS),
        "after whole dims left the indices that lookups match",
    ),
    Pass(
        "inlined",
        _pattern(KNOWN_PLACES),
        "after whole dims left the indices that matter; before shifts, which cuts and joins may be",
    ),
    Pass(
        "inlined",
        _pattern(MERGED_SHIFTS),
        "any time before dead equations: the cuts that it merges become dead",
    ),
    Pass(
        "inlined",
        _pattern(BLOCKS_OF_RECOMPUTATIONS),
        "before the loop around it is rewritten, which is then given what its body picks",
    ),
    Pass(
        "inlined",
        _pattern(PICKED_BLOCKS),
        "any time after: what its blocks were picked by becomes dead",
    ),
    Pass(
        "inlined",
        _pattern(SUMMED_PRODUCTS),
        "any time before dead equations: the products that it takes the place of become dead",
    ),
    Pass(
        "inlined",
        on_equations(without_dead),
        "last of the patterns: removes what nobody reads after them, effects aside; before phases, "
        "which a dead equation could set",
    ),
    Pass(
        "classified",
        without_markers,
        "as soon as phases are known, which is what markers are for: no later pass, nor the cut, "
        "knows them",
    ),
    Pass(
        "cut",
        with_constants_in_update,
        "after the cut, which says what depends on the batch: the rest would be added up over "
        "microbatches",
    ),
    Pass(
        "planned",
        with_shared_reads,
        "last: counts the readers of a value in each phase, which constants in the update change",
    ),
)


def rewritten(program: FlatProgram, moment: str) -> FlatProgram:
    """Return the program after the passes of a moment."""
    for one in PASSES:
        if one.moment == moment:
            program = one.rewrite(program)
    return program
