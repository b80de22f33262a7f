"""The backward pass in two parts: what other stages wait for, and the rest.

By dataflow: an equation of the backward pass belongs to the part *by input* if a value that another
stage reads depends on it (the chain of cotangents), else to the part *by weight* (what only weight
gradients, and so only the update, wait for). An equation with a body is one equation: a scan over
layers, or a `jax.checkpoint` that makes a cotangent, is by input as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from attrs import evolve

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, is_drop
from alpa_meta.inter_op.staging import Staging
from alpa_meta.operators.elementwise import is_barrier


def by_weight(
    eqns: Sequence[JaxprEqn],
    phases: Sequence[str],
    places: Sequence[Hashable],
    sent: Collection[Var] = (),
) -> frozenset[int]:
    """Return the positions of the backward equations that no other place waits for.

    `places` are the stages (or layers) of the equations; `sent` are values that equations not
    listed wait for.
    """
    producer: dict[Atom, int] = {
        var: k
        for k, (eqn, phase) in enumerate(zip(eqns, phases, strict=True))
        if phase == "backward"
        for var in eqn.outvars
        if not is_drop(var)
    }
    waited = [producer[var] for var in sent if var in producer]
    for eqn, phase, place in zip(eqns, phases, places, strict=True):
        if phase != "update":
            read = [producer[a] for a in eqn.invars if not isinstance(a, Literal) and a in producer]
            waited += [k for k in read if places[k] != place]
    by_input: set[int] = set()
    while waited:
        k = waited.pop()
        if k not in by_input:
            by_input.add(k)
            atoms = [a for a in eqns[k].invars if not isinstance(a, Literal)]
            waited += [producer[atom] for atom in atoms if atom in producer]
    return frozenset(producer.values()) - by_input


def by_weight_at_most(
    eqns: Sequence[JaxprEqn],
    phases: Sequence[str],
    layers: Sequence[int | None],
    sent: Collection[Var] = (),
) -> frozenset[int]:
    """Return the positions of the backward equations that no other stage waits for, of whichever
    layers the stages are made.

    Those of layers as stages, and all that the first layer with a backward pass does not wait for:
    where a weight is prepared in one layer (cast, normalised, merged) and read in a later one, the
    later one's cotangent is waited for by the other layer only. More than a stage may have, so that
    no stage that begins behind the first layer has more (it makes no difference to one that begins
    there: nobody waits for its backward pass).
    """
    within = by_weight(eqns, phases, layers, sent)
    homes = zip(layers, phases, strict=True)
    first = min((k for k, phase in homes if phase == "backward" and k is not None), default=None)
    beyond = by_weight(eqns, phases, [layer == first for layer in layers], sent)
    return within | {k for k in beyond if layers[k] != first}


def kept_for_weights(
    eqns: Sequence[JaxprEqn], phases: Sequence[str], delayed: Collection[int]
) -> frozenset[Var]:
    """Return the values that the part by input makes for the part by weight (the `delayed`)."""
    made = {
        var
        for k, (eqn, phase) in enumerate(zip(eqns, phases, strict=True))
        if phase == "backward" and k not in delayed
        for var in eqn.outvars
        if not is_drop(var)
    }
    read = {a for k in delayed for a in eqns[k].invars if not isinstance(a, Literal)}
    return frozenset(made & read)


def read_for_weights(eqns: Sequence[JaxprEqn], delayed: Collection[int]) -> frozenset[Var]:
    """Return the values that the part by weight (the `delayed`) reads, of equations
    `past_barriers`."""
    return frozenset([a for k in delayed for a in eqns[k].invars if not isinstance(a, Literal)])


def past_barriers(eqns: Sequence[JaxprEqn], delayed: Collection[int]) -> tuple[JaxprEqn, ...]:
    """Return equations whose `delayed` ones read what barriers of others were given, not a copy.

    Layers that recompute read from behind a barrier what they were given, which is there in any
    case; a program of its own needs no barrier between it and the forward pass.
    """
    given: dict[Atom, Atom] = {
        new: old
        for k, eqn in enumerate(eqns)
        if is_barrier(eqn) and k not in delayed
        for old, new in zip(eqn.invars, eqn.outvars, strict=True)
        if not isinstance(old, Literal)
    }
    if not given:
        return tuple(eqns)

    def reading(eqn: JaxprEqn) -> JaxprEqn:
        atoms = [a if isinstance(a, Literal) else given.get(a, a) for a in eqn.invars]
        same = all(new is old for new, old in zip(atoms, eqn.invars, strict=True))
        return eqn if same else eqn.replace(invars=atoms)

    return tuple(reading(eqn) if k in delayed else eqn for k, eqn in enumerate(eqns))


def with_split_backward(staging: Staging) -> Staging:
    """Return the staging with the backward pass of each stage in two parts."""
    delayed = by_weight(staging.eqns, staging.phases, staging.stages)
    return evolve(staging, eqns=past_barriers(staging.eqns, delayed), by_weight=delayed)
