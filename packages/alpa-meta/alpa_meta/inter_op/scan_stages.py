"""The program that runs when stages cut scans: one piece of each scan per stage.

A plan is searched on even pieces of each scan (`stacks.even_bounds`), which are finer than its
stages. Consecutive pieces of one stage are then one scan again: the whole program is cut anew, only
where stages meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alpa_meta.compat import is_drop
from alpa_meta.inter_op.layering import Layering, assign_layers, clustered_positions
from alpa_meta.inter_op.recomputation import recomputed
from alpa_meta.inter_op.scan_cutting import CutProgram, Origin, cut_scans
from alpa_meta.inter_op.stacks import Stack, even_bounds, is_cuttable, stacked_inputs, stacks_of
from alpa_meta.inter_op.staging import Staging, assign_stages
from alpa_meta.program_caches import cached_by_program
from alpa_meta.step.program import Program


@cached_by_program(4)  # asked for every kind of recomputation of one program
def cut_evenly(program: Program) -> CutProgram | None:
    """Return `program` with its scans over layers in even pieces, None if it has none."""
    stacks = stacks_of(program)
    if not stacks:
        return None
    return cut_scans(program, stacks, [even_bounds(stack.length) for stack in stacks])


def staged_program(
    cut: CutProgram, layering: Layering, cuts: Sequence[int]
) -> tuple[Program, Staging]:
    """Return the program that runs, and its staging, for layers of `cut` cut into stages at `cuts`.

    `layering` is that of `cut.program`.
    """
    stops = [*cuts, layering.num_layers]
    stage_of = {
        origin: next(stage for stage, stop in enumerate(stops) if layer < stop)
        for origin, layer in _forward_layers(cut, layering)
    }
    bounds = [_bounds(cut, stack, stage_of) for stack in cut.stacks]
    coarse = cut_scans(cut.whole, cut.stacks, bounds)
    stages: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
    for origin, stage in stage_of.items():
        key = (origin.eqn, origin.role)
        stages.setdefault(key, []).append((origin.start, origin.stop, stage))
    latest, found = 0, []
    for position in clustered_positions(coarse.program):
        latest = max(latest, _stage(coarse.origins[position], stages, latest))
        found.append(latest)
    of_stages = [
        layering.recomputation[start:stop] for start, stop in zip([0, *cuts], stops, strict=True)
    ]
    mixed = any(len(set(kinds)) > 1 for kinds in of_stages)
    if mixed or sorted(set(found)) != list(range(len(stops))):
        return cut.program, assign_stages(layering, cuts, cut.program.jaxpr.outvars)
    merged = assign_layers(coarse.program, lambda eqns, inputs: found)
    kinds = {stage: kinds[0] for stage, kinds in enumerate(of_stages)}
    merged = recomputed(merged, kinds, coarse.program)
    outvars = coarse.program.jaxpr.outvars
    return coarse.program, assign_stages(merged, range(1, len(stops)), outvars)


def _forward_layers(cut: CutProgram, layering: Layering) -> Iterator[tuple[Origin, int]]:
    """Yield the origin and layer of each clustered equation; of several with one origin, the
    last."""
    made = {
        var: layer
        for eqn, layer in zip(layering.eqns, layering.layers, strict=True)
        if layer is not None
        for var in eqn.outvars
        if not is_drop(var)
    }
    eqns = cut.program.jaxpr.eqns
    for position in clustered_positions(cut.program):
        for var in eqns[position].outvars:
            if var in made:
                yield cut.origins[position], made[var]
                break


def _bounds(cut: CutProgram, stack: Stack, stage_of: dict[Origin, int]) -> tuple[int, ...]:
    """Return where the stages cut a stack: the ends of pieces whose next piece is in another."""
    ends = {0, stack.length}
    for number, eqn in enumerate(cut.whole.jaxpr.eqns):
        if not is_cuttable(eqn) or stacked_inputs(eqn)[0] not in stack.members:
            continue
        pieces = sorted(
            (origin.start, stage)
            for origin, stage in stage_of.items()
            if origin.eqn == number and origin.role == "piece"
        )
        for (_, before), (start, after) in zip(pieces, pieces[1:]):
            if before != after:
                ends.add(start)
    return tuple(sorted(ends))


def _stage(
    origin: Origin, stages: dict[tuple[int, str], list[tuple[int, int, int]]], default: int
) -> int:
    """Return the last stage among the even pieces that an equation is made of."""
    pieces = stages.get((origin.eqn, origin.role), ())
    inside = [
        stage
        for start, stop, stage in pieces
        if origin.role != "piece" or (origin.start <= start and stop <= origin.stop)
    ]
    return max(inside, default=default)
