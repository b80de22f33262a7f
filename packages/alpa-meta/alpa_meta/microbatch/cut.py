"""A step cut into microbatches: what one microbatch runs, and what it is given beside its examples.

The program of the whole batch is walked in order (`flow`). Where an operator cannot run on what a
microbatch holds, as in `sum(loss * mask) / sum(mask)`, it is given what it lacks:

    statistic   what depends on no parameter (counts, weights, places of the data) is computed once
                per step on the whole batch, before the microbatches
    total       a sum that depends on parameters (the share of tokens that each expert got, the
                gradient of an earlier loss) is added up over the microbatches by a forward pass of
                its own, before the others, and read whole: gradients are linear in what reads it,
                so they add up
    together    where a loss takes values of all examples together, as contrastive ones do, these
                are put together by such a pass, and read whole (`joint_reads`)
    number      which microbatch it is: random bits and counted places are those of its own examples

What no gradient depends on is moved into the update instead (`gathering`). What is left, such as
the statistics of batch normalisation, which every layer takes of the last one's results, is refused
with the user's line.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
from jax import lax
from jax.core import ShapedArray

from alpa_meta.compat import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    consts,
    dtype_of,
    is_drop,
    open_jaxpr,
)
from alpa_meta.microbatch.cut_step import Cut, Given, place_of, statistics_of, variables
from alpa_meta.microbatch.demand import with_parts_made
from alpa_meta.microbatch.flow import Run, read
from alpa_meta.microbatch.joint_reads import MOST_ROUNDS, earliest
from alpa_meta.microbatch.placement import REPLICATED, Placement, Reading, split
from alpa_meta.microbatch.slicing import Writer
from alpa_meta.microbatch.walk import Walk
from alpa_meta.passes.added_equations import equations_of, jaxpr_of
from alpa_meta.passes.live import live_eqns


def cut_program(
    closed: ClosedJaxpr,
    phases: Sequence[str],
    inputs: Sequence[Placement],
    trained: Sequence[bool],
    num_microbatches: int,
) -> Cut:
    """Return the whole program cut into microbatches.

    `inputs` are the placements of its inputs, `trained` says which are parameters: values that
    depend on them are not computed on the whole batch.
    """
    reasons: Sequence[str] = ()
    whole: list[Var] = []
    for _ in range(MOST_ROUNDS):
        walk = Walk(closed, phases, inputs, trained, num_microbatches, whole)
        if walk.repeats_weights():
            break
        walk.walk()
        if not walk.reasons:
            cut = _written(walk)
            _check_gradients(walk, phases, cut)
            if not walk.reasons:
                return cut
        reasons = reasons or walk.reasons
        before, whole = whole, earliest(open_jaxpr(closed), {*whole, *walk.joint})
        if whole == before:
            break
    return Cut(closed, tuple(phases), {}, (), None, {}, tuple(reasons))


def _check_gradients(walk: Walk, phases: Sequence[str], cut: Cut) -> None:
    """Refuse microbatches that make no gradients of their examples, as the update makes all."""
    of_gradients = zip(open_jaxpr(cut.closed).eqns, cut.phases, strict=True)
    used = (v for eqn, phase in of_gradients if phase == "backward" for v in variables(eqn))
    if any(cut.placements.get(var, REPLICATED).kind != "replicated" for var in used):
        return
    eqns = walk.jaxpr.eqns[: len(phases)]
    if walk.whole_of:
        walk.refuse("all gradients are made of the whole batch")
    for k, (eqn, phase) in enumerate(zip(eqns, phases, strict=True)):
        kinds = {read(atom, walk.known).kind for atom in eqn.invars}
        statistic = k in walk.from_statistics and "split" in kinds
        if statistic or walk.read_whole.get(k) and phase != walk.phases[k]:
            return walk.refuse(
                f"{place_of(walk.jaxpr.eqns[k:])} takes more examples of the batch at a time "
                "than a microbatch has, and all gradients come after it"
            )


def _written(walk: Walk) -> Cut:
    """Return the program of a microbatch."""
    walk.add_in_update()
    number = Var(ShapedArray((1,), np.dtype(np.int32)))
    scalar = Var(ShapedArray((), np.dtype(np.int32)))
    writer = Writer(walk.count, scalar)
    kept = list(_kept(walk))
    outputs = [(atom, read(atom, walk.known)) for atom in walk.jaxpr.outvars]
    chosen, demands = with_parts_made(
        [eqn for eqn, _, _ in kept], [run for _, run, _ in kept], outputs, walk.count
    )
    invars = [writer.define(var, walk.known[var]) for var in walk.jaxpr.invars]
    for var in walk.jaxpr.constvars:
        writer.define(var, REPLICATED)
    given = [Given(number, "number", "number of the microbatch")]
    for place, (var, value) in enumerate(walk.whole.items()):
        in_parts = walk.known.get(var, REPLICATED) == split(0) or demands.get(var) == {split(0)}
        held = writer.define(var, split(0) if in_parts else REPLICATED)
        name = f"statistic {place} of the batch, {_named(walk, value)}"
        given.append(Given(held, "part" if in_parts else "statistic", name))
    for place, (var, value) in enumerate(walk.totals.items()):
        writer.define(var, REPLICATED)
        given.append(Given(var, "total", f"total {place} over the batch, {_named(walk, value)}"))
    of_eqn: list[str] = []
    for var, narrow in walk.narrowed.items():
        writer.define(narrow, REPLICATED)
        convert = functools.partial(lax.convert_element_type, new_dtype=dtype_of(narrow))
        writer.eqns += equations_of(convert, [var], [narrow])
        of_eqn += ["forward"] * (len(writer.eqns) - len(of_eqn))
    for (eqn, _, phase), run in zip(kept, chosen, strict=True):
        for whole in variables(eqn):
            if whole in walk.gathered and whole not in writer.local:
                value = walk.gathered[whole]
                writer.gather(value, whole)
                made = len(writer.eqns) - len(of_eqn)
                of_eqn += [walk.phase_of.get(value, "forward")] * made
        writer.phase = phase
        if run is None:
            writer.eqns.append(eqn)
            for var in eqn.outvars:
                if not is_drop(var):
                    writer.define(var, REPLICATED)
        else:
            writer.write(eqn, run)
        for value in eqn.outvars:
            if value in walk.put_in:
                writer.gather(value, walk.put_in[value])
        of_eqn += [phase] * (len(writer.eqns) - len(of_eqn))
    outvars = [writer.read(atom, None) for atom in walk.jaxpr.outvars]
    totals = {given: writer.local[value] for given, value in walk.totals.items()}
    if writer.uses_number:
        writer.eqns[:0] = equations_of(lambda one: one[0], [number], [scalar])
        of_eqn[:0] = ["forward"] * (len(writer.eqns) - len(of_eqn))
    else:
        given = given[1:]
    pairs = list(zip(writer.eqns, of_eqn, strict=True))
    live = {*live_eqns(writer.eqns, [*outvars, *totals.values()])}
    pairs = [(eqn, phase) for eqn, phase in pairs if eqn in live]
    flat = jaxpr_of(
        walk.jaxpr,
        list(walk.jaxpr.constvars),
        [*invars, *(one.var for one in given)],
        outvars,
        [eqn for eqn, _ in pairs],
    )
    return Cut(
        ClosedJaxpr(flat, consts(walk.closed)),
        tuple(phase for _, phase in pairs),
        writer.held(),
        tuple(given),
        statistics_of(walk.closed, list(walk.whole.values()), walk.known),
        totals,  # type: ignore[arg-type]
        (),
        {
            held: var
            for var, held in writer.local.items()
            if isinstance(held, Var) and held is not var
        },
    )


def _kept(walk: Walk) -> Iterator[tuple[JaxprEqn, Run | None, str]]:
    """Yield the equations that microbatches run, how, and their phases."""
    for k, (eqn, run, phase) in enumerate(
        zip(walk.jaxpr.eqns, walk.runs, walk.phases, strict=True)
    ):
        if k in walk.from_statistics:
            continue
        for whole in walk.before.get(k, ()):
            reading = Reading((REPLICATED,) * len(whole.invars), (REPLICATED,) * len(whole.outvars))
            yield whole, Run(reading), phase
        given = walk.read_whole.get(k, {})
        if given:
            eqn = eqn.replace(
                invars=[a if isinstance(a, Literal) else given.get(a, a) for a in eqn.invars]
            )
        yield eqn, run, phase


def _named(walk: Walk, value: Var) -> str:
    value = next((var for var, part in walk.put_in.items() if part is value), value)
    maker = next((eqn for eqn in walk.jaxpr.eqns if value in eqn.outvars), None)
    return "an input" if maker is None else place_of([maker])
