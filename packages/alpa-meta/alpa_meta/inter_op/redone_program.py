"""A stage's equations where all its layers recompute as one kind says, and what they move.

A backward pass in two parts, by input and by weight, is two programs: what the first leaves for the
second is in memory, also where one program would compute it inside the kernels that read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from alpa_meta.compat import JaxprEqn, Literal, Var
from alpa_meta.inter_op.recomputation import clones_of_layers
from alpa_meta.inter_op.scope_facts import ScopeFacts, redone_of
from alpa_meta.inter_op.split_backward import (
    by_weight,
    kept_for_weights,
    past_barriers,
    read_for_weights,
)
from alpa_meta.inter_op.staging import with_sunk_sums
from alpa_meta.intra_op.fused_traffic import Bytes, traffic_of
from alpa_meta.intra_op.other_sizes import OtherSizes, others_of
from alpa_meta.intra_op.stage_problem import StageEqns
from alpa_meta.program_caches import cached_by_program


@frozen(eq=False)
class RedoneProgram:
    """A stage's equations in the order that they run in, with those that run again.

    `first` and `again`: what an equation of the stage, by position, is here the first time and once
    more. `renamed`: values of the stage, and what those that run again and their readers read
    instead. `delayed`: what a split backward keeps for its part by weight, which reads `late`.
    """

    stage: StageEqns
    first: Mapping[int, JaxprEqn]
    again: Mapping[int, JaxprEqn]
    renamed: Sequence[tuple[Var, Var]]
    delayed: frozenset[Var]
    late: frozenset[Var]


@cached_by_program(2)  # what is asked of one is asked in a row
def redone_program(facts: ScopeFacts, kind: str) -> RedoneProgram:
    """Return the equations where all layers recompute as `kind` says."""
    stage, home = facts.scope.eqns, facts.scope.layers
    clones = {} if kind == "none" else clones_of_layers(stage.eqns, stage.phases, home, kind)
    eqns: list[JaxprEqn] = []
    phases: list[str] = []
    layers: list[int | None] = []
    first: dict[int, JaxprEqn] = {}
    for k, (eqn, phase, layer) in enumerate(zip(stage.eqns, stage.phases, home, strict=True)):
        own = None
        if phase == "backward" and layer is not None:
            own = clones.get(layer)
        found = [] if own is None else own.before(eqn)
        first[k] = eqn if own is None else own.reading(eqn)
        eqns += [*found, first[k]]
        phases += [phase] * (1 + len(found))
        layers += [layer] * (1 + len(found))
    summed = with_sunk_sums(eqns, phases, layers)
    later = by_weight(eqns, summed, layers, facts.scope.boundary_out)
    past = past_barriers(eqns, later)
    again: dict[int, JaxprEqn] = {}
    for one in clones.values():
        again |= one.clones
    return RedoneProgram(
        evolve(
            stage,
            eqns=eqns,
            phases=phases,
            keys=(None,) * len(eqns),
            kept=_read_later(eqns, phases) if stage.kept else frozenset(),
        ),
        first,
        again,
        [pair for one in clones.values() for pair in one.renamed],
        kept_for_weights(past, phases, later),
        read_for_weights(past, later),
    )


@cached_by_program(64)  # scopes are on many meshes
def delayed_at(facts: ScopeFacts, kind: str) -> tuple[tuple[int, int], ...]:
    """Return what a split backward keeps for its part by weight: positions of the stage's equations
    that make it, and numbers of results."""
    program = redone_program(facts, kind)
    return tuple(
        (k, number)
        for some in (program.first, program.again)
        for k, eqn in some.items()
        for number, var in enumerate(eqn.outvars)
        if var in program.delayed
    )


def waiting_at(facts: ScopeFacts, kind: str) -> tuple[tuple[int, int], ...]:
    """Return all that is kept while a backward by weight waits, as `delayed_at` returns the first
    part: that, and what it reads of the results of the forward pass that are kept."""
    late, eqns = redone_program(facts, kind).late, facts.scope.eqns.eqns
    kept = redone_of(facts, kind).kept
    return (*delayed_at(facts, kind), *((k, n) for k, n in kept if eqns[k].outvars[n] in late))


def _read_later(eqns: Sequence[JaxprEqn], phases: Sequence[str]) -> frozenset[Var]:
    """Return the forward results that the backward pass reads."""
    made = {
        var
        for eqn, phase in zip(eqns, phases, strict=True)
        if phase == "forward"
        for var in eqn.outvars
    }
    return frozenset(
        atom
        for eqn, phase in zip(eqns, phases, strict=True)
        if phase == "backward"
        for atom in eqn.invars
        if not isinstance(atom, Literal) and atom in made
    )


@frozen(eq=False)
class RedoneTraffic:
    """The bytes that equations move through memory, by position, where layers recompute."""

    first: Mapping[int, Bytes]
    again: Mapping[int, Bytes]


@cached_by_program(64)  # scopes are on many meshes
def redone_traffic(
    facts: ScopeFacts,
    kind: str,
    others: tuple[StageEqns, ...],
    platform: str,
    attends: bool,
    split: bool = False,
) -> RedoneTraffic:
    """Return what equations move where all layers recompute as `kind` says, `split`: with a
    backward pass in two parts."""
    program, stage = redone_program(facts, kind), facts.scope.eqns
    twins = others_of(stage, others)
    values = dict(twins.values)
    values |= {new: twins.values[old] for old, new in program.renamed if old in twins.values}
    runs = program.first, program.again
    pairs = [(eqn, stage.eqns[k]) for some in runs for k, eqn in some.items()]
    theirs = {eqn: twins.eqns[old] for eqn, old in pairs if old in twins.eqns}
    for body in (one for one in twins.eqns if one not in theirs):  # of regions
        theirs[body] = twins.eqns[body]
    here = evolve(program.stage, delayed=program.delayed) if split else program.stage
    moved = traffic_of(here, OtherSizes(theirs, values), platform, attends)
    first, again = ({k: moved[eqn] for k, eqn in some.items() if eqn in moved} for some in runs)
    return RedoneTraffic(first, again)
