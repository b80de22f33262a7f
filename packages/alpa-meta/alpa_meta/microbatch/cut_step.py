"""What a step cut into microbatches is: what one of them runs, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from alpa_meta.compat import ClosedJaxpr, JaxprEqn, Literal, Var, consts, open_jaxpr, source_line
from alpa_meta.microbatch.placement import Placement
from alpa_meta.passes.added_equations import jaxpr_of
from alpa_meta.passes.live import live_eqns


@frozen(eq=False)
class Given:
    """What every microbatch is given beside its inputs: its variable, kind and name.

    `kind` is "number", "statistic" (whole), "part" (of a statistic, along dim 0) or "total".
    """

    var: Var
    kind: str
    name: str


@frozen(eq=False)
class Statistics:
    """A program that runs once per step on the whole batch: it reads the step's inputs at the
    positions `inputs`, of which `of_batch` says which are split by the microbatches."""

    closed: ClosedJaxpr
    inputs: tuple[int, ...]
    of_batch: tuple[bool, ...]


@frozen(eq=False)
class Cut:
    """The program of one microbatch, whose last inputs are `given`.

    `totals` maps a given total to the microbatch's value that is added up to it. `origin` maps its
    variables to those of the whole program, where they differ. `reasons` say why it does not
    compute what the whole batch does, if it does not.
    """

    closed: ClosedJaxpr
    phases: tuple[str, ...]
    placements: Mapping[Var, Placement]
    given: tuple[Given, ...]
    statistics: Statistics | None
    totals: Mapping[Var, Var]
    reasons: tuple[str, ...]
    origin: Mapping[Var, Var] = field(factory=dict)


def statistics_of(
    closed: ClosedJaxpr, wanted: Sequence[Var], known: Mapping[Var, Placement]
) -> Statistics | None:
    """Return the program that makes the `wanted` values of a step on its whole batch, None if there
    are none."""
    if not wanted:
        return None
    jaxpr = open_jaxpr(closed)
    eqns = [eqn for eqn in live_eqns(jaxpr.eqns, wanted) if not eqn.effects]
    needed = {atom for eqn in eqns for atom in variables(eqn)} | set(wanted)
    inputs = [k for k, var in enumerate(jaxpr.invars) if var in needed]
    invars = [jaxpr.invars[k] for k in inputs]
    flat = jaxpr_of(jaxpr, list(jaxpr.constvars), invars, wanted, eqns)
    of_batch = tuple(known[var].kind == "split" for var in invars)
    return Statistics(ClosedJaxpr(flat, consts(closed)), tuple(inputs), of_batch)


def variables(eqn: JaxprEqn) -> list[Var]:
    """Return the operands of an equation but literals."""
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def place_of(eqns: Sequence[JaxprEqn]) -> str:
    """Return the first operator and its line of the user's code, or the first line after it."""
    name = str(eqns[0].primitive.name)
    own = source_line(eqns[0])
    if own:
        return f"{name} at {own}"
    later = next((line for eqn in eqns if (line := source_line(eqn))), "")
    return f"{name}, used at {later}," if later else name
