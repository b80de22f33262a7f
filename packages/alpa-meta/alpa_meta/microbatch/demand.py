"""Parts of replicated values, made as parts: a mask that every microbatch reads only its part of.

A value that depends on no example (zeros, iota, random bits of the batch's shape) is replicated,
and a microbatch may always take its part of it. Where nobody needs more, the equation that makes it
makes only the part: the local form of random bits hashes just the places of that part. The walk
goes from the last equation to the first, since a part may ask for parts in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from alpa_meta.compat import JaxprEqn, Literal, Var, is_drop
from alpa_meta.microbatch.flow import Atom, Run
from alpa_meta.microbatch.placement import Placement, replicated_as_split
from alpa_meta.operators.regions import is_region

Demands = dict[Var, set[Placement]]


def with_parts_made(
    eqns: Sequence[JaxprEqn],
    runs: Sequence[Run | None],
    outputs: Sequence[tuple[Atom, Placement]],
    num_microbatches: int,
) -> tuple[list[Run | None], Demands]:
    """Return the runs with parts made where only parts are read, and how each value is read.

    A run of None reads its operands as they are. `outputs` are the results with the placements that
    they leave in.
    """
    demands: Demands = {}
    found = list(runs)
    for atom, placement in outputs:
        _ask(demands, atom, placement)
    for k in range(len(eqns) - 1, -1, -1):
        eqn, run = eqns[k], runs[k]
        if run is not None and not run.bodies and not is_region(eqn):
            run = found[k] = _as_parts(eqn, run, demands, num_microbatches)
        for number, atom in enumerate(eqn.invars):
            _ask(demands, atom, None if run is None else run.reading.operands[number])
    return found, demands


def _ask(demands: Demands, atom: Atom, placement: Placement | None) -> None:
    if not isinstance(atom, Literal):
        asked = Placement("whole") if placement is None else evolve(placement, zero=False)
        demands.setdefault(atom, set()).add(asked)


def _as_parts(
    eqn: JaxprEqn, run: Run, demands: Mapping[Var, set[Placement]], num_microbatches: int
) -> Run:
    """Return how an equation of replicated values makes parts, if all of it is read in parts."""
    reading = run.reading
    if any(one.kind != "replicated" for one in (*reading.operands, *reading.results)):
        return run
    asked = {
        number: demands[var]
        for number, var in enumerate(eqn.outvars)
        if not is_drop(var) and var in demands
    }
    if not asked:
        return run
    number, wanted = next(iter(asked.items()))
    (placement, *others) = wanted
    if others or placement.kind != "split" or placement.outer > 1:
        return run
    made = replicated_as_split(eqn, number, placement.dim, num_microbatches)
    if made is None or any(asked[k] != {made.results[k]} for k in asked):
        return run
    return Run(made)
