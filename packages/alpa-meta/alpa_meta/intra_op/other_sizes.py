"""One problem priced at several sizes: which equation of another size is which.

The programs of two microbatch sizes have the same equations, whose shapes differ. What a strategy
costs at the other size needs no problem of its own: the walk over the equations of one size asks
for the seconds and bytes of each one's twin, with the same strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field

from alpa_meta.compat import Jaxpr, JaxprEqn, Literal, Var, open_jaxpr
from alpa_meta.intra_op.stage_problem import StageEqns
from alpa_meta.operators.regions import bodies, is_region
from alpa_meta.program_caches import cached_by_program


@define(eq=False)
class OtherSizes:
    """The twins of each equation and of each value."""

    eqns: Mapping[JaxprEqn, tuple[JaxprEqn, ...]] = field(factory=dict)
    values: Mapping[Var, tuple[Var, ...]] = field(factory=dict)


@cached_by_program(16)  # stages are on many meshes
def others_of(stage: StageEqns, others: tuple[StageEqns, ...]) -> OtherSizes:
    """Return the twins of a stage's equations and values in `others`, which have the same equations
    at other sizes (`same_equations`)."""
    found = OtherSizes({}, {})
    if others:
        _pair(found, stage.eqns, [other.eqns for other in others])
    return found


def same_equations(eqns: Sequence[JaxprEqn], others: Sequence[JaxprEqn]) -> bool:
    """Return whether two programs have the same equations, but for the shapes: where a dim of one
    is left, what broadcasts to it may be left out."""
    if [eqn.primitive.name for eqn in eqns] != [eqn.primitive.name for eqn in others]:
        return False
    inner = ((bodies(one), bodies(two)) for one, two in zip(eqns, others, strict=True))
    return all(
        len(mine) == len(its)
        and all(
            same_equations(open_jaxpr(one).eqns, open_jaxpr(two).eqns)
            for one, two in zip(mine, its, strict=True)
        )
        for mine, its in inner
    )


def _pair(
    found: OtherSizes, eqns: Sequence[JaxprEqn], others: Sequence[Sequence[JaxprEqn]]
) -> None:
    assert isinstance(found.eqns, dict) and isinstance(found.values, dict)
    for eqn, *twins in zip(eqns, *others, strict=True):
        found.eqns[eqn] = tuple(twins)
        _values(found, [*eqn.invars, *eqn.outvars], [[*t.invars, *t.outvars] for t in twins])
        if is_region(eqn):
            inner = [list(map(open_jaxpr, bodies(one))) for one in (eqn, *twins)]
            for body, *its in zip(*inner, strict=True):
                _bodies(found, body, its)


def _bodies(found: OtherSizes, body: Jaxpr, others: Sequence[Jaxpr]) -> None:
    _values(found, body.invars, [other.invars for other in others])
    _pair(found, body.eqns, [other.eqns for other in others])


def _values(found: OtherSizes, atoms: Sequence[object], others: Sequence[Sequence[object]]) -> None:
    assert isinstance(found.values, dict)
    for atom, *twins in zip(atoms, *others, strict=True):
        if isinstance(atom, Var) and not isinstance(atom, Literal):
            found.values[atom] = tuple(twin for twin in twins if isinstance(twin, Var))
