"""What passes rewrite: a program without calls, and what is known of it by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import evolve, field, frozen

from alpa_meta.compat import ClosedJaxpr, Var
from alpa_meta.microbatch.placement import Placement


@frozen(eq=False)
class FlatProgram:
    """A program or the body of a region, all calls inlined.

    `phases` are those of its equations, `placements` how microbatches hold its variables; both are
    empty until they are known, and in bodies. `needed` are read beside its results. `slice_of` says
    which token slice makes a value.
    """

    closed: ClosedJaxpr
    phases: tuple[str, ...] = ()
    placements: Mapping[Var, Placement] = field(factory=dict)
    needed: tuple[Var, ...] = ()
    slice_of: Mapping[Var, int] = field(factory=dict)


def on_equations(
    rewrite: Callable[[ClosedJaxpr], ClosedJaxpr],
) -> Callable[[FlatProgram], FlatProgram]:
    """Return the pass that rewrites equations, before they have phases."""
    return lambda program: evolve(program, closed=rewrite(program.closed))
