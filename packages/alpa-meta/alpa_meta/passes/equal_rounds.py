"""Rounds of gradient accumulation that a step has written out: all of them at once.

    for k in range(3):                        parts = batch.reshape(3, -1)
        total += gradient(batch[8k:8k+8])     total = reduce_sum(vmap(gradient)(parts))

Equations that depend on one part of the batch are of its round. Those of one round are matched with
those of the others, in order: they are the same operator, of operands that are the same value, have
been matched themselves, or depend on no part. Of the latter, as of a key for each round, equations
are matched as well, unless they depend on one another; what cannot be, as numbers of rounds, is put
together. So what is matched is right at once, whatever else is not, which reads its part of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
from jax.extend.core import jaxpr_as_fun

from alpa_meta.compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, is_drop, with_eqns
from alpa_meta.operators.random import draws_alike_mapped
from alpa_meta.passes.added_equations import at_line_of, equations_of, jaxpr_of
from alpa_meta.passes.batch_parts import Parts
from alpa_meta.passes.operator_keys import operator_key
from alpa_meta.passes.own_values import OwnValues, over_rounds, put_together
from alpa_meta.passes.round_sums import variables, with_sums_at_once
from alpa_meta.step.phases import is_of_backward_pass

Readers = dict[tuple[Var, int, Hashable], list[JaxprEqn]]
"""{(what is read, at which place, by what operator): equations of a round}"""


def with_equal_rounds_at_once(program: ClosedJaxpr, parts: Sequence[Parts]) -> ClosedJaxpr | None:
    """Return the program with the rounds that take these parts at once; None where they hold no
    gradient, or none that can be."""
    rounds = _Rounds(program, parts)
    rounds.match()
    found = any(map(is_of_backward_pass, rounds.body))
    if not found or not all(map(draws_alike_mapped, rounds.body)):
        return None
    try:
        return with_eqns(program, rounds.written())
    except NotImplementedError:  # as jax says of primitives that cannot be mapped
        return None


class _Rounds:
    """The rounds of a program, and what of them is the same.

    The last round stands for all, as the first may have more (what it adds up starts with zeros):
    `body` are its equations that were matched, `values` the values of all rounds by its own.
    """

    def __init__(self, program: ClosedJaxpr, parts: Sequence[Parts]) -> None:
        self.program, self.count = program, len(parts[0].rounds)
        self.body: list[JaxprEqn] = []
        self.values: dict[Var, tuple[Var, ...]] = {}
        self._makers = {var: eqn for eqn in program.jaxpr.eqns for var in eqn.outvars}
        self._own = OwnValues(self._makers, {eqn: k for k, eqn in enumerate(program.jaxpr.eqns)})
        self._matched: set[JaxprEqn] = set()
        self._round: dict[Var, int] = {}  # of what depends on parts; -1: on those of several rounds
        self._first: dict[Var, Var] = {}  # a part -> the same, as its round takes it first
        self._members: list[list[JaxprEqn]] = [[] for _ in range(self.count)]
        self._follow(parts)
        self._parts = [one for one in parts if one.whole not in self._round]
        for one in self._parts:
            self.values[one.rounds[-1][0]] = tuple(own[0] for own in one.rounds)

    def _follow(self, parts: Sequence[Parts]) -> None:
        """Find the round that each value is of."""
        taken = {
            var: (k, own[0]) for one in parts for k, own in enumerate(one.rounds) for var in own
        }
        for eqn in self.program.jaxpr.eqns:
            depends = {self._round[atom] for atom in variables(eqn.invars) if atom in self._round}
            if not depends:
                for var in eqn.outvars:
                    if var in taken:
                        self._round[var], self._first[var] = taken[var]
                continue
            of = depends.pop() if len(depends) == 1 else -1
            self._round.update((var, of) for var in eqn.outvars)
            if of >= 0 and not eqn.effects:
                self._members[of].append(eqn)

    def match(self) -> None:
        """Match the equations of the last round with those of the others that read the same."""
        readers = [self._readers(eqns) for eqns in self._members]
        for eqn in self._members[-1]:
            known = [
                (place, self.values[atom])
                for place, atom in enumerate(self._operands(eqn))
                if isinstance(atom, Var) and atom in self.values
            ]
            if not known:
                continue
            (place, read), *_ = known
            found: list[JaxprEqn] = []
            for k, value in enumerate(read[:-1]):
                every = readers[k].get((value, place, operator_key(eqn)), ())
                found += [one for one in every if self._fits(one, eqn, k)][:1]
            if len(found) == self.count - 1:
                self._add((*found, eqn))

    def _readers(self, eqns: Sequence[JaxprEqn]) -> Readers:
        found: Readers = {}
        for eqn in eqns:
            for place, atom in enumerate(self._operands(eqn)):
                if isinstance(atom, Var) and atom in self._round:
                    found.setdefault((atom, place, operator_key(eqn)), []).append(eqn)
        return found

    def _operands(self, eqn: JaxprEqn) -> list[Atom]:
        return [a if isinstance(a, Literal) else self._first.get(a, a) for a in eqn.invars]

    def _is_of_rounds(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self._round

    def _fits(self, eqn: JaxprEqn, last: JaxprEqn, k: int) -> bool:
        """Return whether an equation of round `k` reads what one of the last round reads there."""
        if eqn in self._matched:
            return False
        for own, atom in zip(self._operands(eqn), self._operands(last), strict=True):
            if isinstance(atom, Var) and atom in self._round:
                if atom not in self.values or self.values[atom][k] is not own:
                    return False
            elif self._is_of_rounds(own):
                return False
        return True

    def _add(self, eqns: tuple[JaxprEqn, ...]) -> None:
        """Add an equation to the body, given those of all rounds."""
        operands = zip(*map(self._operands, eqns), strict=True)
        invars = [
            atoms[-1] if self._is_of_rounds(atoms[-1]) else self._own.standing(atoms)
            for atoms in operands
        ]
        self._matched.update(eqns)
        outvars = [Var(var.aval) if is_drop(var) else var for var in eqns[-1].outvars]
        self.body.append(eqns[-1].replace(invars=invars, outvars=outvars))
        results = zip(*(eqn.outvars for eqn in eqns), strict=True)
        self.values.update(zip(outvars, results, strict=True))

    def written(self) -> list[JaxprEqn]:
        """Return the equations of the program, the rounds at once."""
        eqns, outvars = self.program.jaxpr.eqns, self.program.jaxpr.outvars
        before = [eqn for eqn in eqns if not any(map(self._is_of_rounds, eqn.invars))]
        apart = {*before, *self._matched}
        after = [eqn for eqn in eqns if eqn not in apart]
        read = {
            atom for atoms in (outvars, *(eqn.invars for eqn in after)) for atom in variables(atoms)
        }
        made = [var for eqn in self.body for var in eqn.outvars]
        results = [var for var in made if not read.isdisjoint(self.values[var])]
        together = {self.values[var]: over_rounds(var, self.count) for var in results}
        return [
            *before,
            *self._at_once(results, list(together.values())),
            *with_sums_at_once(after, outvars, together, self._makers),
        ]

    def _at_once(self, results: Sequence[Var], outvars: Sequence[Var]) -> list[JaxprEqn]:
        """Return the equations that make the results of all rounds."""
        body = [*self._own.body, *self.body]
        made = {var for eqn in body for var in eqn.outvars}
        read = dict.fromkeys(
            atom for eqn in body for atom in variables(eqn.invars) if atom not in made
        )
        parts = {one.rounds[-1][0]: one for one in self._parts if one.rounds[-1][0] in read}
        stacks = {var: atoms for var, atoms in self._own.stacks.items() if var in read}
        fixed = [var for var in read if var not in parts and var not in stacks]
        eqns: list[JaxprEqn] = []
        mapped: list[Var] = []
        for var, part in parts.items():
            mapped.append(over_rounds(var, self.count))
            eqns += at_line_of(part.cut, equations_of(part.together, [part.whole], mapped[-1:]))
        for var, atoms in stacks.items():
            mapped.append(over_rounds(var, self.count))
            eqns += put_together(atoms, mapped[-1])
        inner = jaxpr_of(self.program.jaxpr, [], [*fixed, *parts, *stacks], results, body)
        dims = (*[None] * len(fixed), *[0] * len(mapped))
        every = jax.vmap(jaxpr_as_fun(ClosedJaxpr(inner, ())), in_axes=dims, axis_size=self.count)
        return [*eqns, *equations_of(every, [*fixed, *mapped], outvars)]
