"""Why a step would compute something else in microbatches than on the whole batch, if it would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from alpa_meta.compat import Literal, is_drop, open_jaxpr, source_line
from alpa_meta.microbatch.scaling import CONSTANT, Scaling
from alpa_meta.step.phases import Phases


def inexact_reasons(jaxpr: Any, phases: Phases, scaling: Mapping[Any, Scaling]) -> tuple[str, ...]:
    """Return why microbatches would change the result: mixed values that leave them, and work on
    examples in the update, which sees no microbatch.
    """
    inside: set[Any] = set()
    mixed, late = False, None
    for eqn, phase in zip(jaxpr.eqns, phases.of_eqn, strict=True):
        if phase != "update":
            inside.update(var for var in eqn.outvars if not is_drop(var))
            continue
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        forms = {scaling.get(atom, CONSTANT).form for atom in read}
        mixed |= any(_mixed(atom, scaling) for atom in read if atom in inside)
        if "example" in forms and late is None:
            late = eqn
    mixed |= any(
        _mixed(atom, scaling)
        for atom in jaxpr.outvars
        if not isinstance(atom, Literal) and atom in inside
    )
    reasons = []
    if mixed:
        reasons.append(
            f"{_first_mixed(jaxpr, scaling)} mixes examples of the batch in a way that "
            f"microbatches cannot reproduce{_sum_read(jaxpr, scaling)}"
        )
    if late is not None:
        reasons.append(
            f"{late.primitive.name} at {source_line(late)} works on the examples of the batch "
            "after the update"
        )
    return tuple(reasons)


def divergence(one: Any, other: Any) -> str:
    """Return where two flat programs first have different operations, empty if they do not."""
    eqns, others = open_jaxpr(one).eqns, open_jaxpr(other).eqns
    pairs = zip_longest(eqns, others)
    first = next((k for k, (a, b) in enumerate(pairs) if _name(a) != _name(b)), None)
    if first is None:
        return ""
    return _described(eqns[first:] or others[first:])


def _name(eqn: Any) -> str:
    return "" if eqn is None else str(eqn.primitive.name)


def _mixed(atom: Any, scaling: Mapping[Any, Scaling]) -> bool:
    return scaling.get(atom, CONSTANT).form == "mixed"


def _mixing(jaxpr: Any, scaling: Mapping[Any, Scaling]) -> list[Any]:
    """Return the operations with a mixed result."""
    return [
        eqn
        for eqn in jaxpr.eqns
        if any(not is_drop(var) and _mixed(var, scaling) for var in eqn.outvars)
    ]


def _sum_read(jaxpr: Any, scaling: Mapping[Any, Scaling]) -> str:
    """Return what to say of the first mixing operation if it reads a sum over the batch."""
    read = [atom for atom in _mixing(jaxpr, scaling)[0].invars if not isinstance(atom, Literal)]
    sums = any(scaling.get(atom, CONSTANT).form == "reduced" for atom in read)
    return " (it works on a sum over all of them, which no microbatch has)" if sums else ""


def _first_mixed(jaxpr: Any, scaling: Mapping[Any, Scaling]) -> str:
    """Return the first operation with a mixed result, and where the user's code makes or uses
    it."""
    return _described(_mixing(jaxpr, scaling))


def _described(eqns: Sequence[Any]) -> str:
    """Return the first operation and its place, or that of the first that has one."""
    name = str(eqns[0].primitive.name)
    place = next((place for eqn in eqns if (place := source_line(eqn))), "")
    if not place:
        return name
    return f"{name} at {place}" if source_line(eqns[0]) else f"{name}, used at {place},"
