"""Sums over rounds of gradient accumulation, of values that are known of all rounds at once.

    (g0 + g1) + g2                            is   reduce_sum(g)
    m + (g2 - m) / 3, m = (g0 + g1) / 2       is   reduce_sum(g) / 3
    concatenate(g0, g1, g2)                   is   g, reshaped

What else reads the value of one round is given its part.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from attrs import frozen
from jax import Array, lax

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_of, shape_of
from alpa_meta.operators.cutting import joined_dim
from alpa_meta.operators.elementwise import is_masking_sum, is_sum, linear_terms
from alpa_meta.operators.layout import filled_with
from alpa_meta.passes.added_equations import at_line_of, equations_of
from alpa_meta.passes.own_values import value_of_round

Together = Mapping[tuple[Var, ...], Var]
"""{the values of one kind, by round: all of them, [rounds, *value]}"""

Number = int | float | Array

_ROUNDINGS = 1e-12
"""Of a weight: rounds whose weights differ by less have equal ones. Those of a running mean differ
by what float64 rounds, 1e-16 of them in each round, and rounds are some thousands at most."""


def with_sums_at_once(
    eqns: Sequence[JaxprEqn],
    outvars: Sequence[Atom],
    together: Together,
    makers: Mapping[Var, JaxprEqn],
) -> Iterator[JaxprEqn]:
    """Yield `eqns`, which read values of single rounds, reading those of all rounds at once where
    they add them up or join them. `makers` are the equations of the values of no round."""
    reads = Counter(atom for eqn in eqns for atom in variables(eqn.invars))
    reads.update(variables(outvars))
    sums = _Sums(eqns, together, makers, reads)
    found: dict[JaxprEqn, Sequence[JaxprEqn]] = {}
    for eqn in eqns:
        joined = together.get(tuple(variables(eqn.invars))) if _is_join(eqn) else None
        if joined is not None:
            found[eqn] = at_line_of(eqn, _joined(eqn, joined))
    for linear in (False, True):  # plain sums first: what is done with them after is left alone
        for eqn in reversed(eqns):
            chain = sums.chain(eqn, linear, found) if is_masking_sum(eqn) else None
            if chain is not None:
                found.update((inside, ()) for inside in chain.steps)
                found[eqn] = at_line_of(eqn, chain.at_once())
    rest = [one for eqn in eqns for one in found.get(eqn, (eqn,))]
    readers = {atom: eqn for eqn in reversed(rest) for atom in variables(eqn.invars)}
    returned = {*variables(outvars)}
    for values, every in together.items():
        for k, value in enumerate(values):
            if value in readers or value in returned:
                part = equations_of(value_of_round, [every], [value], k)
                yield from at_line_of(readers[value], part) if value in readers else part
    yield from rest


def variables(atoms: Sequence[Atom]) -> Iterator[Var]:
    """Yield what is no literal."""
    return (atom for atom in atoms if not isinstance(atom, Literal))


def _is_join(eqn: JaxprEqn) -> bool:
    return joined_dim(eqn) is not None and len([*variables(eqn.invars)]) == len(eqn.invars)


def _joined(eqn: JaxprEqn, every: Var) -> list[JaxprEqn]:
    dim, (result,) = joined_dim(eqn) or 0, eqn.outvars

    def join(values: Array) -> Array:
        return lax.reshape(jnp.moveaxis(values, 0, dim), shape_of(result))

    return equations_of(join, [every], [result])


@frozen(eq=False)
class _Step:
    """The operands in which an equation is linear, each with how (`linear_terms`), and the number
    that it multiplies or divides them by."""

    operands: Sequence[tuple[Var, str]]
    factor: Atom | None = None


@frozen(eq=False)
class _Chain:
    """Equations, the last first, that add up to the result of the last.

    `leaves` are what they add up beside the values of all rounds, `every`.
    """

    steps: Mapping[JaxprEqn, _Step]
    leaves: Sequence[Var]
    every: Together

    def at_once(self) -> list[JaxprEqn]:
        """Return equations that add up the values of all rounds at once."""
        factors = [step.factor for step in self.steps.values() if step.factor is not None]
        read = list(dict.fromkeys((*self.every.values(), *self.leaves, *variables(factors))))
        (result,) = next(iter(self.steps)).outvars

        def total(*values: Array) -> Array:
            given = dict(zip(read, values, strict=True))
            weights = self._weights(given)
            terms = [
                _weighted_sum(given[every], [weights[one] for one in own])
                for own, every in self.every.items()
            ]
            for leaf in self.leaves:
                terms.append(_times(given[leaf], weights[leaf]))
            return functools.reduce(lax.add, terms)

        return equations_of(total, read, [result])

    def _weights(self, given: Mapping[Var, Array]) -> Mapping[Var, Number]:
        """Return what each leaf is multiplied by in the sum: its derivative by the leaf."""
        weights: dict[Var, Number] = {next(iter(self.steps)).outvars[0]: 1}
        for eqn, step in self.steps.items():
            own, factor = weights[eqn.outvars[0]], step.factor
            by: Number = 1
            if factor is not None:
                by = _known(factor) if isinstance(factor, Literal) else given[factor]
            for operand, how in step.operands:
                weights[operand] = weights.get(operand, 0) + _DERIVATIVES[how](own, by)
        return weights


_DERIVATIVES: dict[str, Callable[[Number, Number], Number]] = {
    "+": lambda own, _: own,
    "-": lambda own, _: -own,
    "*": lambda own, by: own * by,
    "/": lambda own, by: own / by,
}


def _known(literal: Literal) -> int | float:
    number: int | float = np.asarray(literal.val).item()
    return number


def _weighted_sum(every: Array, weights: Sequence[Number]) -> Array:
    """Return the sum of the values of all rounds, [rounds, *value], each times its weight."""
    known = [weight for weight in weights if isinstance(weight, (int, float))]
    if len(known) == len(weights):
        if max(known) - min(known) <= _ROUNDINGS * abs(known[0]):
            return _times(lax.reduce_sum(every, (0,)), known[0])
    each = jnp.stack([jnp.asarray(weight, every.dtype) for weight in weights])
    apart = lax.expand_dims(each, range(1, every.ndim))
    return lax.reduce_sum(every * apart, (0,))


def _times(value: Array, weight: Number) -> Array:
    if isinstance(weight, int) and weight == 1:
        return value
    return lax.mul(value, jnp.broadcast_to(jnp.asarray(weight, value.dtype), value.shape))


class _Sums:
    """The equations in which sums of rounds are looked for."""

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        together: Together,
        makers: Mapping[Var, JaxprEqn],
        reads: Mapping[Var, int],
    ) -> None:
        self._eqns, self._together, self._makers, self._reads = eqns, together, makers, reads
        self._kind = {value: values for values in together for value in values}
        self._place = {var: k for k, eqn in enumerate(eqns) for var in eqn.outvars}

    def chain(self, last: JaxprEqn, linear: bool, others: Container[JaxprEqn]) -> _Chain | None:
        """Return the equations that add up to the result of `last`, none of `others`, if all rounds
        are among what they add; if `linear`, some may multiply or divide by numbers."""
        steps: dict[JaxprEqn, _Step] = {}
        leaves: dict[Var, None] = {}
        read: Counter[Var] = Counter()
        pending = [-self._place[last.outvars[0]]]
        while pending:
            eqn = self._eqns[-heapq.heappop(pending)]
            inside = eqn is last or all(read[var] == self._reads[var] for var in eqn.outvars)
            step = self._step(eqn, linear) if inside and eqn not in others else None
            if step is None:
                leaves.update((var, None) for var in eqn.outvars if read[var])
                continue
            steps[eqn] = step
            for atom, _ in step.operands:
                read[atom] += 1
                if atom not in self._place:
                    leaves[atom] = None
                elif read[atom] == 1:
                    heapq.heappush(pending, -self._place[atom])
        kinds = dict.fromkeys(self._kind[leaf] for leaf in leaves if leaf in self._kind)
        every = {own: self._together[own] for own in kinds if leaves.keys() >= set(own)}
        of_rounds = {value for own in every for value in own}
        left = [leaf for leaf in leaves if leaf not in of_rounds]
        return _Chain(steps, left, every) if every else None

    def _step(self, eqn: JaxprEqn, linear: bool) -> _Step | None:
        terms = linear_terms(eqn)
        if not terms or not linear and not is_sum(eqn):
            return None
        if linear and not jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.floating):
            return None
        operands = [(eqn.invars[place], how) for place, how in terms]
        if terms[0][1] in "+-":
            added = [(atom, how) for atom, how in operands if not isinstance(atom, Literal)]
            others = [atom for atom, _ in operands if isinstance(atom, Literal)]
            return None if any(map(_known, others)) else _Step(added)
        for (atom, how), (place, _) in zip(operands, terms, strict=True):
            factor = self._number(eqn.invars[1 - place])
            if factor is not None and not isinstance(atom, Literal):
                return _Step([(atom, how)], factor)
        return None

    def _number(self, atom: Atom) -> Atom | None:
        """Return the number that a value is, or is filled with, if it is of no round."""
        if isinstance(atom, Literal):
            return atom
        if atom in self._kind or atom in self._place:
            return None
        if shape_of(atom) == ():
            return atom
        filled = filled_with(self._makers[atom]) if atom in self._makers else None
        return None if filled is None else self._number(filled)
