"""What the programs of a stage hold from their start to their end.

A stage of a pipeline is several programs: of its forward and backward pass, or of those of every
token slice. The caller of a program holds its operands, so that they live until it ends, whatever
was their last reader: all that a layer keeps for its backward pass is still there while the last
gradient is computed. And XLA sets aside the memory of all results before a program runs, beside
that of its temporaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from alpa_meta.compat import Atom, Var
from alpa_meta.intra_op.equation_facts import facts_of
from alpa_meta.intra_op.liveness import Timeline
from alpa_meta.intra_op.stage_problem import Source, StageEqns


@frozen
class Border:
    """A program of a stage: the position of its first equation, what it reads that it does not
    make, and what it makes that others read."""

    start: int
    operands: tuple[Var, ...]
    results: tuple[Var, ...]


def borders(stage: StageEqns) -> Mapping[int, Border]:
    """Return {position after its last equation: border} of the programs of a stage.

    The update reads accumulators in the place of what is summed over microbatches.
    """
    tasks, defined = stage.tasks, stage.defined
    summed = stage.accumulated if stage.num_microbatches > 1 else frozenset[Var]()
    starts = [k for k in range(len(tasks)) if not k or tasks[k] != tasks[k - 1]]
    operands: list[tuple[int, int, dict[Var, None]]] = []
    leaving = set(stage.sent)
    for start, stop in zip(starts, [*starts[1:], len(tasks)], strict=False):
        read: dict[Var, None] = {}
        replaced = summed if stage.phases[start] == "update" else frozenset[Var]()
        for eqn in stage.eqns[start:stop]:
            for var in facts_of(eqn).reads:
                if not start <= defined.get(var, -1) < stop and var not in replaced:
                    read[var] = None
        leaving.update(read)
        operands.append((start, stop, read))
    return {
        stop: Border(
            start,
            tuple(read),
            tuple(var for eqn in stage.eqns[start:stop] for var in eqn.outvars if var in leaving),
        )
        for start, stop, read in operands
    }


def end_program(
    border: Border, timeline: Timeline, sources: Mapping[Atom, Source], times: Sequence[int]
) -> None:
    """Note on a timeline that a program ends now; `times` are those at which equations began."""
    results = [sources[var] for var in border.results]
    timeline.hold([*(sources[var] for var in border.operands), *results])
    timeline.leave_program(results, times[border.start])
