"""The program of a microbatch in token slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from attrs import frozen

from alpa_meta.compat import (
    ClosedJaxpr,
    JaxprEqn,
    Var,
    consts,
    is_drop,
    open_jaxpr,
    shape_of,
    source_line,
)
from alpa_meta.operators import flops, kernel_kind
from alpa_meta.passes.added_equations import jaxpr_of
from alpa_meta.passes.live import live_eqns
from alpa_meta.token_slices.analysis import analysed
from alpa_meta.token_slices.blocks import write_blocks
from alpa_meta.token_slices.branches import write_branches, write_branches_again
from alpa_meta.token_slices.key_blocks import write_key_blocks
from alpa_meta.token_slices.places import SliceRequest, Slices
from alpa_meta.token_slices.regions import write_region
from alpa_meta.token_slices.values import (
    BEFORE,
    Analysis,
    Blocks,
    Branches,
    KeyBlocks,
    Known,
    SlicingError,
)
from alpa_meta.token_slices.writer import Again, Regions, Writer

MOST_WHOLE = 0.5
"""Share of the forward pass's work that may be on all tokens at once: slices of a model that does
more so (a convolution over pixels, a network on features) would wait for it and gain nothing."""


@frozen(eq=False)
class SlicedProgram:
    """A program in token slices, which computes what the whole one does.

    `slice_of` says which slice makes a value; those of the update are of none.
    """

    closed: ClosedJaxpr
    phases: tuple[str, ...]
    slice_of: Mapping[Var, int]
    slices: Slices


def in_wanted_slices(
    closed: ClosedJaxpr,
    phases: Sequence[str],
    tokens: Sequence[bool],
    wanted: SliceRequest,
) -> SlicedProgram:
    """Return a program in the slices that are asked for; SlicingError if it cannot be computed so.

    `tokens` says which inputs are of the batch.
    """
    invars = open_jaxpr(closed).invars
    shapes = [shape_of(var) for var, held in zip(invars, tokens, strict=True) if held]
    sizes = [shape[1] for shape in shapes if len(shape) > 1]
    refused: SlicingError | None = None
    for slices in wanted.candidates(sizes):
        try:
            if wanted.lengths:
                return in_slices(closed, phases, tokens, slices)
            return in_whole_chunks(slices, lambda some: in_slices(closed, phases, tokens, some))
        except SlicingError as error:
            refused = refused or error
    asked = f"slices of {wanted.lengths} tokens" if wanted.lengths else f"{wanted.count} slices"
    if refused is None:
        raise SlicingError(
            f"the step cannot be cut into {asked}: the arrays of its batch have "
            f"{sorted({*sizes})} along dim 1, which must be the tokens, or one more; give "
            "token_slices that add up to them"
        )
    raise SlicingError(
        f"the step cannot be cut into {asked} of its tokens: {refused}. Leave out token_slices and "
        "num_token_slices to run it whole",
        refused.chunk,
    ) from None


Made = TypeVar("Made")


def in_whole_chunks(slices: Slices, make: Callable[[Slices], Made], *, fewer: bool = False) -> Made:
    """Return what `make` makes of slices, of others of about the same lengths if those end inside
    chunks of the tokens; `fewer`: of fewer where there are not as many chunks."""
    chunk, tried = 1, slices
    while True:
        try:
            return make(tried)
        except SlicingError as error:
            chunk = math.lcm(chunk, error.chunk or 1)
            found = slices.of_multiples(chunk)
            if not error.chunk or found is None or found == tried:
                raise
            if found.count < slices.count and not fewer:
                raise
            tried = found


def in_slices(
    closed: ClosedJaxpr,
    phases: Sequence[str],
    tokens: Sequence[bool],
    slices: Slices,
    needed: Sequence[Var] = (),
) -> SlicedProgram:
    """Return a program in token slices; SlicingError if it cannot be computed so.

    `tokens` says which inputs hold the tokens of the batch; `needed` are values that are read
    beside the results.
    """
    analysis = analysed(closed, phases, tokens, slices)
    if not analysis.is_sliced:
        why = f": {analysis.whole}" if analysis.whole else ""
        raise SlicingError(f"none of its operators works on them one by one{why}")
    check_work(analysis)
    jaxpr = open_jaxpr(closed)
    templates: dict[Hashable, ClosedJaxpr] = {}
    writer = Writer(analysis, templates, _write_region)
    writer.write()
    writer.sweep = 2
    outvars = [writer.full(atom) for atom in [*jaxpr.outvars, *needed]][: len(jaxpr.outvars)]
    live = {*live_eqns([w.eqn for w in writer.written], [*outvars, *needed])}
    written = [one for one in writer.written if one.eqn in live]
    made = jaxpr_of(
        jaxpr, list(jaxpr.constvars), jaxpr.invars, outvars, [one.eqn for one in written]
    )
    slice_of = {
        var: one.slice_number
        for one in written
        if one.slice_number is not None
        for var in one.eqn.outvars
        if not is_drop(var)
    }
    phases = tuple(one.phase for one in written)
    return SlicedProgram(ClosedJaxpr(made, consts(closed)), phases, slice_of, slices)


def _write_region(writer: Writer, eqn: JaxprEqn, region: Regions, again: Again | None) -> None:
    if isinstance(region, Branches) and again is not None:
        write_branches_again(writer, eqn, region, again)
    elif isinstance(region, Branches):
        write_branches(writer, eqn, region)
    elif isinstance(region, Blocks):
        write_blocks(writer, eqn, region)
    elif isinstance(region, KeyBlocks):
        write_key_blocks(writer, eqn, region)
    else:
        write_region(writer, eqn, region)


def check_work(analysis: Analysis) -> None:
    """Raise SlicingError for a program whose forward pass works mostly on all tokens at once."""
    eqns = open_jaxpr(analysis.closed).eqns
    forward = [
        (flops(eqn), eqn, isinstance(decision, Known))
        for eqn, decision, sweep in zip(eqns, analysis.decisions, analysis.sweeps, strict=True)
        if sweep == BEFORE and kernel_kind(eqn) != "elementwise"
    ]
    whole = [(work, eqn) for work, eqn, known in forward if known]
    if sum(work for work, _ in whole) > MOST_WHOLE * sum(work for work, *_ in forward):
        _, eqn = max(whole, key=lambda one: one[0])
        line = source_line(eqn)
        place = f" at {line}" if line else ""
        why = f"; {analysis.whole}" if analysis.whole else ""
        raise SlicingError(
            f"most of its work is on all tokens at once: {eqn.primitive.name}{place}{why}"
        )
