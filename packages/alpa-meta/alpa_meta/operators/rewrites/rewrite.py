"""What a rewrite is: a pattern of operators, known by the one at which it ends."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import jax
from attrs import field, frozen
from jax import Array

from alpa_meta.compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, with_eqns


@frozen(eq=False)
class Origins:
    """Where values come from: {variable: its equation}, {variable: the constant closed over}, and
    {variable: how often it is read}."""

    eqns: Mapping[Var, JaxprEqn]
    constants: Mapping[Var, Array]
    reads: Mapping[Var, int] = field(factory=dict)

    def eqn(self, atom: Atom) -> JaxprEqn | None:
        """Return the equation that `atom` is a result of, if there is one."""
        return None if isinstance(atom, Literal) else self.eqns.get(atom)

    def only_read(self, atom: Atom) -> JaxprEqn | None:
        """Return the equation that `atom` is a result of, if nothing else reads it."""
        return None if isinstance(atom, Literal) or self.reads[atom] > 1 else self.eqns.get(atom)

    def constant(self, atom: Atom) -> Array | None:
        """Return the array that `atom` is, if it is closed over and can be read here."""
        value = None if isinstance(atom, Literal) else self.constants.get(atom)
        return None if isinstance(value, jax.Array) and not value.is_fully_addressable else value


@frozen
class Rewrite:
    """A pattern of operators that ends at one of the primitives `ends`.

    `replaced` returns the equations that compute the results of such an equation instead, None
    where it ends no such pattern. What only the old ones read becomes dead.
    """

    ends: frozenset[str]
    replaced: Callable[[JaxprEqn, Origins], Sequence[JaxprEqn] | None]


def with_rewrite(program: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
    """Return the program with every pattern of `rewrite` replaced."""
    eqns = program.jaxpr.eqns
    ends = {k for k, eqn in enumerate(eqns) if eqn.primitive.name in rewrite.ends}
    if not ends:
        return program
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    producers = {var: eqn for eqn in eqns for var in eqn.outvars}
    read = itertools.chain(program.jaxpr.outvars, *(eqn.invars for eqn in eqns))
    reads = Counter(atom for atom in read if not isinstance(atom, Literal))
    origins = Origins(producers, constants, reads)
    found: list[JaxprEqn] = []
    for k, eqn in enumerate(eqns):
        replaced = rewrite.replaced(eqn, origins) if k in ends else None
        if replaced is not None:
            producers.update((var, one) for one in replaced for var in one.outvars)
        found += [eqn] if replaced is None else replaced
    return with_eqns(program, found)
