"""Why a step would compute something else in microbatches than on the whole batch, if it would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alpa_meta.compat import Literal, is_drop, source_line
from alpa_meta.frontend.batch import CONSTANT, Scaling
from alpa_meta.frontend.phases import Phases


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
            "microbatches cannot reproduce"
        )
    if late is not None:
        reasons.append(
            f"{late.primitive.name} at {source_line(late)} works on the examples of the batch "
            "after the update"
        )
    return tuple(reasons)


def _mixed(atom: Any, scaling: Mapping[Any, Scaling]) -> bool:
    return scaling.get(atom, CONSTANT).form == "mixed"


def _first_mixed(jaxpr: Any, scaling: Mapping[Any, Scaling]) -> str:
    """Return the first operation with a mixed result, and where the user's code makes or uses
    it."""
    found = [
        eqn
        for eqn in jaxpr.eqns
        if any(not is_drop(var) and _mixed(var, scaling) for var in eqn.outvars)
    ]
    place = next((place for eqn in found if (place := source_line(eqn))), "")
    if source_line(found[0]) or not place:
        return _described(found[0])
    return f"{found[0].primitive.name}, used at {place},"


def _described(eqn: Any) -> str:
    place = source_line(eqn)
    return f"{eqn.primitive.name} at {place}" if place else str(eqn.primitive.name)
