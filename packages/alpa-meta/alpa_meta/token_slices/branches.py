"""Conditionals in token slices: one for each slice, whose branches are the slice's parts of them.

A branch that looks back on what it made in an earlier slice is handed that; of what only another
branch makes, a conditional hands out zeros, which nothing reads: all slices take the same branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Var,
    array_type,
    consts,
    dtype_of,
    open_jaxpr,
    shape_of,
)
from alpa_meta.operators.regions import with_bodies
from alpa_meta.passes.added_equations import jaxpr_of
from alpa_meta.token_slices.regions import BodyWriter
from alpa_meta.token_slices.sums import add_part
from alpa_meta.token_slices.values import Branches, Region, Value
from alpa_meta.token_slices.writer import Again, Writer


class _Branch(BodyWriter):
    """Writes a branch for all slices; its results are, outside, those of the `first` branch."""

    def __init__(
        self, parent: Writer, eqn: JaxprEqn, branches: Branches, k: int, first: _Branch | None
    ) -> None:
        operands = eqn.invars[1:]
        region = Region(branches.bodies[k], len(operands), 0, False)
        super().__init__(parent, eqn.replace(invars=operands), region)
        self._values, self._first = branches.results, first
        self._made: dict[tuple[int, int], Var | None] = {}

    def value_of(self, k: int) -> Value:
        """Return what is known of a result, whichever branch makes it."""
        return self._values[k]

    def outside(self, k: int, number: int) -> Var | None:
        """Return the variable outside for a result of a slice, None if it makes none."""
        if self._first is not None:
            return self._first.outside(k, number)
        if (k, number) not in self._made:
            self._made[k, number] = super().outside(k, number)
        return self._made[k, number]

    def prune(self) -> list[dict[Var, Var]]:
        """Drop what nothing reads; return by slice what other slices read of its body, and the
        variables outside for it."""
        order = self.parent.order(self.sweep)
        for number in order:
            self.lists[number] = self.live(number, self.results(number))
        handed: list[dict[Var, Var]] = [{} for _ in order]
        owner = {var: number for number in order for var in self.defined(number)}
        for number in order:
            for var in self.foreign(number, self.results(number)):
                handed[owner[var]].setdefault(var, Var(array_type(var)))
        return handed

    def inputs(self, number: int, handed: Sequence[dict[Var, Var]]) -> list[tuple[Var, Atom]]:
        """Return the inputs of a slice's body, and what they are outside."""
        outside = {var: made for one in handed for var, made in one.items()}
        foreign = self.foreign(number, self.results(number))
        return [*self.fixed[number].values(), *((var, outside[var]) for var in foreign)]

    def closed(self, number: int, inputs: Sequence[Var], outputs: Sequence[Atom]) -> ClosedJaxpr:
        """Return a slice's body."""
        jaxpr = open_jaxpr(self.analysis.closed)
        eqns = self.lists[number]
        made = jaxpr_of(jaxpr, list(jaxpr.constvars), list(inputs), list(outputs), eqns)
        return ClosedJaxpr(made, consts(self.analysis.closed))

    def zeros(self, var: Var, number: int) -> Var:
        """Write zeros in the place of what another branch hands out."""
        made, shape, dtype = Var(array_type(var)), shape_of(var), dtype_of(var)
        self.compute(("zeros", shape, dtype), lambda: jnp.zeros(shape, dtype), [], [made], number)
        return made


def write_branches(parent: Writer, eqn: JaxprEqn, branches: Branches) -> None:
    """Write a conditional for all slices."""
    first = _Branch(parent, eqn, branches, 0, None)
    others = (_Branch(parent, eqn, branches, k, first) for k in range(1, len(branches.bodies)))
    writers = [first, *others]
    for writer in writers:
        writer.write()
    handed = [writer.prune() for writer in writers]
    for number in parent.order(parent.sweep):
        inputs = [w.inputs(number, one) for w, one in zip(writers, handed, strict=True)]
        closed = []
        for k, writer in enumerate(writers):
            given = [
                var if j == k else Var(array_type(var))
                for j, pairs in enumerate(inputs)
                for var, _ in pairs
            ]
            out = [atom for _, atom in writer.results(number)]
            for j, one in enumerate(handed):
                out += [v if j == k else writer.zeros(v, number) for v in one[number]]
            closed.append(writer.closed(number, given, out))
        results = [var for var, _ in first.results(number)]
        results += [made for one in handed for made in one[number].values()]
        operands = [parent.operand(eqn.invars[0], (), number)]
        operands += [held for pairs in inputs for _, held in pairs]
        changed = with_bodies(eqn, _one_by_one(closed))
        parent.emit(changed.replace(invars=operands, outvars=results), number)
    for var, made, number in first.sums_made:
        add_part(parent, var, made, number)


def write_branches_again(parent: Writer, eqn: JaxprEqn, branches: Branches, again: Again) -> None:
    """Write a result of a conditional for the tokens up to a slice's last."""
    result, made, layout, number = again
    writers = [_Branch(parent, eqn, branches, k, None) for k in range(len(branches.bodies))]
    found = [
        writer.operand(open_jaxpr(writer.analysis.closed).outvars[result], layout, number)
        for writer in writers
    ]
    inputs = [[*writer.fixed[number].values()] for writer in writers]
    closed = []
    for k, (writer, atom) in enumerate(zip(writers, found, strict=True)):
        given = [
            var if j == k else Var(array_type(var))
            for j, pairs in enumerate(inputs)
            for var, _ in pairs
        ]
        closed.append(writer.closed(number, given, [atom]))
    operands = [parent.operand(eqn.invars[0], (), number)]
    operands += [held for pairs in inputs for _, held in pairs]
    changed = with_bodies(eqn, _one_by_one(closed))
    parent.emit(changed.replace(invars=operands, outvars=[made]), number)


def _one_by_one(closed: Sequence[ClosedJaxpr]) -> Callable[[ClosedJaxpr], ClosedJaxpr]:
    left = iter(closed)
    return lambda _: next(left)
