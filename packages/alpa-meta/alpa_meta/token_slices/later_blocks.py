"""What a loop over blocks of keys does in the blocks behind a slice: nothing, or it is refused.

The body is evaluated for the rows of a slice and any later block. The masks are known there, what
the loop hands on is unknown values, and each operator makes numbers, multiples of unknown values
and of their products of its operands (`operators.linear`). So the usual steps come out as no
change:

    m' = max(m, max of -inf) = m        a = exp(m - m') = 1        p = exp(-inf - m') = 0
    l' = l a + sum of p = l             o' = o a + p v = o, or (o l a + p v) / l' = o
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np
from attrs import define, evolve, field

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_of, is_drop, open_jaxpr, shape_of
from alpa_meta.operators import operator_of, operator_signature
from alpa_meta.operators.elementwise import is_comparison, is_elementwise
from alpa_meta.operators.intervals import Interval, results_of
from alpa_meta.operators.linear import (
    Linear,
    Powers,
    Unknown,
    divisor_of,
    of_linear,
    product_of,
)
from alpa_meta.token_slices.mask_facts import MaskFacts
from alpa_meta.token_slices.masking import masked, number_of
from alpa_meta.token_slices.places import Layout, whole
from alpa_meta.token_slices.values import (
    Added,
    Analysis,
    Branches,
    Known,
    Recomputed,
    Region,
    Sliced,
)


@define(eq=False)
class Unknowns:
    """The unknown values of a program: those that are made alike of the same are one."""

    known: dict[Hashable, Unknown] = field(factory=dict)

    def of(self, key: Hashable, atom: Atom, *, steady: bool = False, live: bool = False) -> Unknown:
        """Return the unknown value of a key, of the type of `atom`."""
        if key not in self.known:
            dtype = str(dtype_of(atom))
            self.known[key] = Unknown(len(self.known), dtype, steady, live)
        return self.known[key]

    def product(self, terms: Mapping[Powers, float], atom: Atom) -> Linear:
        """Return a sum of multiples of products of powers, of the type of `atom`."""
        found = Linear(terms.get((), 0.0))
        for powers, times in terms.items():
            if powers and times:
                one = powers[0][0]
                if len(powers) > 1 or powers[0][1] != 1:
                    key, steady = (powers, dtype_of(atom)), all(u.steady for u, _ in powers)
                    one = evolve(self.of(key, atom, steady=steady), powers=powers)
                found = found.plus(linear(one), times)
        return found

    def spread(self, value: Linear, atom: Atom, shape: tuple[int, ...]) -> Linear:
        """Return what a value is along all dims of a larger shape: one value of a row is not
        another of a column."""
        if shape_of(atom) == shape:
            return value
        found = Linear(value.constant)
        for unknown, times in value.terms:
            pairs = unknown.powers or ((unknown, 1),)
            spread = ((self._spread(one, atom, shape), power) for one, power in pairs)
            powers = tuple(sorted(spread, key=lambda pair: pair[0].number))
            found = found.plus(self.product({powers: 1.0}, atom), times)
        return found

    def _spread(self, one: Unknown, atom: Atom, shape: tuple[int, ...]) -> Unknown:
        key = "spread", one, shape_of(atom), shape
        return self.of(key, atom, steady=one.steady, live=one.live)

    def new(self, atom: Atom) -> Linear:
        """Return an unknown value that is like no other."""
        return linear(self.of(("new", len(self.known)), atom))


def linear(unknown: Unknown) -> Linear:
    """Return an unknown value as a multiple of itself."""
    return Linear(0.0, ((unknown, 1.0),))


def in_later_blocks(
    found: Analysis,
    given: Mapping[Var, Linear],
    unknowns: Unknowns,
    handed_on: Collection[Atom] | None = None,
) -> list[Linear]:
    """Return what a body makes in a block behind a slice, of what it is `given` there; the values
    not given are known. Of the forward pass, `handed_on` are the results that the loop hands on."""
    return _Evaluation(found, dict(given), unknowns, handed_on).run()


class _Evaluation:
    """The values of a body in a block behind a slice."""

    def __init__(
        self,
        found: Analysis,
        held: dict[Var, Linear],
        unknowns: Unknowns,
        handed_on: Collection[Atom] | None,
    ) -> None:
        assert found.scope is not None
        self.found, self.held, self.unknowns, self.handed_on = found, held, unknowns, handed_on
        self.eqns = open_jaxpr(found.closed).eqns
        self.masks = MaskFacts(found, found.scope)

    def run(self) -> list[Linear]:
        jaxpr = open_jaxpr(self.found.closed)
        for eqn, decision in zip(jaxpr.eqns, self.found.decisions, strict=True):
            if isinstance(decision, Known | Recomputed):
                continue
            if isinstance(decision, Sliced):
                made = self._operator(eqn, decision.reading.operands)
            elif isinstance(decision, Added):
                made = self._operator(eqn, [whole(len(shape_of(atom))) for atom in eqn.invars])
            elif isinstance(decision, Region) and not decision.is_scan:
                made = self._body(decision.body, eqn, eqn.invars)
            elif isinstance(decision, Branches):
                made = self._branches(eqn, decision)
            else:
                made = [self.unknowns.new(var) for var in eqn.outvars]
            for var, value in zip(eqn.outvars, made, strict=True):
                if not is_drop(var):
                    self.held[var] = value
        return [self.value(atom, None) for atom in jaxpr.outvars]

    def value(self, atom: Atom, layout: Layout | None) -> Linear:
        """Return what a slice reads of a value in a later block."""
        if isinstance(atom, Literal):
            return Linear(float(atom.val)) if not np.iscomplexobj(atom.val) else self.new(atom)
        if atom in self.held:
            return self.held[atom]
        value = self.found.value(atom)
        assert not value.in_parts, atom
        wanted = whole(len(value.layout)) if layout is None else layout
        number = self.masks.operand_rest(atom, value, wanted)
        if number is not None:
            return Linear(float(number))
        return linear(self.unknowns.of(("known", atom), atom))

    def new(self, atom: Atom) -> Linear:
        return self.unknowns.new(atom)

    def _body(self, body: Analysis, eqn: JaxprEqn, operands: Sequence[Atom]) -> list[Linear]:
        invars, outvars = open_jaxpr(body.closed).invars, open_jaxpr(body.closed).outvars
        handed_on: list[Atom] | None = None
        if self.handed_on is not None:
            pairs_out = zip(eqn.outvars, outvars, strict=True)
            handed_on = [inner for outer, inner in pairs_out if outer in self.handed_on]
        pairs = [(v, a) for v, a in zip(invars, operands, strict=True) if body.value(v).in_parts]
        held = {v: self.value(a, None) for v, a in pairs}
        return in_later_blocks(body, held, self.unknowns, handed_on)

    def _branches(self, eqn: JaxprEqn, decision: Branches) -> list[Linear]:
        index = self.value(eqn.invars[0], None).number
        last = len(decision.bodies) - 1
        taken = decision.bodies
        if index is not None:
            taken = (decision.bodies[min(max(int(index), 0), last)],)
        made = [self._body(body, eqn, eqn.invars[1:]) for body in taken]
        return [
            ways[0] if len({*ways}) == 1 else self.new(var)
            for var, ways in zip(eqn.outvars, zip(*made), strict=True)
        ]

    def _operator(self, eqn: JaxprEqn, layouts: Sequence[Layout]) -> list[Linear]:
        operands = [self.value(*pair) for pair in zip(eqn.invars, layouts, strict=True)]
        if operator_of(eqn).passes_on:
            return operands
        if len(eqn.outvars) == 1 and not eqn.effects:
            made = self._result(eqn, operands)
            if made is not None:
                return [made]
        steady = all(one.steady for one in operands)
        key = operator_signature(eqn), tuple(operands)
        return [
            linear(self.unknowns.of((*key, k), var, steady=steady))
            if not eqn.effects
            else self.new(var)
            for k, var in enumerate(eqn.outvars)
        ]

    def _result(self, eqn: JaxprEqn, operands: Sequence[Linear]) -> Linear | None:
        if is_comparison(eqn) and eqn.invars[0] is eqn.invars[1]:
            found = results_of(eqn, [Interval(0.0, 0.0)] * 2).constant
            return None if found is None else Linear(found)
        number = number_of(eqn, [one.number for one in operands])
        if number is not None:
            return Linear(number)
        if is_elementwise(eqn):
            shape = shape_of(eqn.outvars[0])
            operands = [
                self.unknowns.spread(one, atom, shape)
                for one, atom in zip(operands, eqn.invars, strict=True)
            ]
        result = of_linear(eqn, operands, -masked(dtype_of(eqn.invars[0])))
        if result is None and self._may_divide(eqn, operands):
            terms = product_of(eqn, operands)
            result = None if terms is None else self.unknowns.product(terms, eqn.outvars[0])
        return result

    def _may_divide(self, eqn: JaxprEqn, operands: Sequence[Linear]) -> bool:
        """Return whether what an equation divides by is not 0, or what a slice has is not finite
        either: its own last block divided by the same, which it hands on or is given."""
        atom = divisor_of(eqn)
        if atom is None or self.handed_on is None:
            return True
        value = operands[0] if len(operands) == 1 else operands[1]
        producer = {var: one for one in self.eqns for var in one.outvars}
        while atom not in self.handed_on and isinstance(atom, Var) and atom in producer:
            made = producer[atom]
            if not operator_of(made).layout or len(made.invars) > 1:
                return False
            (atom,) = made.invars
        return atom in self.handed_on or value.number is not None
