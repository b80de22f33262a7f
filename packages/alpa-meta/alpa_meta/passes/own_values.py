"""Values that differ from round to round and depend on no part of the batch, such as masks.

    mask0 = bits(key0), mask1 = bits(key1)    is   vmap(bits)(stack(key0, key1))

Equal equations of all rounds are one that is mapped over the rounds, unless one of them depends on
another, as a key that is split for the next round. What is left is put together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import jax.numpy as jnp
from jax import Array, lax

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, array_type, dtype_of, shape_of
from alpa_meta.operators.random import draws_alike_mapped
from alpa_meta.passes.added_equations import equations_of
from alpa_meta.passes.operator_keys import literal_key, operator_key

Atoms = tuple[Atom, ...]
"""The values of all rounds."""


class OwnValues:
    """The equations that make such values, mapped over the rounds (`body`), and the variables of
    what is put together (`stacks`). `makers` and `places` are of the program's equations."""

    def __init__(self, makers: Mapping[Var, JaxprEqn], places: Mapping[JaxprEqn, int]) -> None:
        self.body: list[JaxprEqn] = []
        self.stacks: dict[Var, Atoms] = {}
        self._makers, self._places = makers, places
        self._standing: dict[Hashable, Atom] = {}
        self._mapped: set[Var] = set()

    def standing(self, atoms: Atoms) -> Atom:
        """Return what stands for the values of all rounds in the body: one of them, if they are the
        same, else a variable that is mapped over the rounds."""
        pending, found = [atoms], dict[tuple[JaxprEqn, ...], None]()
        while pending:
            one = pending.pop()
            makers = () if _key(one) in self._standing else self._alike(one)
            if makers and makers not in found:
                found[makers] = None
                pending += zip(*(eqn.invars for eqn in makers), strict=True)
        for makers in sorted(found, key=lambda eqns: self._places[eqns[-1]]):
            last = makers[-1]
            invars = [self._read(one) for one in zip(*(eqn.invars for eqn in makers), strict=True)]
            outvars = last.outvars
            if any(isinstance(atom, Var) and atom in self._mapped for atom in invars):
                outvars = [Var(var.aval) for var in outvars]
                self._mapped.update(outvars)
                self.body.append(last.replace(invars=invars, outvars=outvars))
            for var, results in zip(outvars, zip(*(eqn.outvars for eqn in makers)), strict=True):
                self._standing[_key(results)] = var
        return self._read(atoms)

    def _read(self, atoms: Atoms) -> Atom:
        key = _key(atoms)
        if len(set(key)) == 1:
            return atoms[-1]
        if key not in self._standing:
            var = self._standing[key] = Var(array_type(atoms[-1]))
            self._mapped.add(var)
            self.stacks[var] = atoms
        return self._standing[key]

    def _alike(self, atoms: Atoms) -> tuple[JaxprEqn, ...]:
        """Return the equations that make values of all rounds alike, none if they are not."""
        variables = [atom for atom in atoms if isinstance(atom, Var)]
        found = tuple(self._makers[atom] for atom in variables if atom in self._makers)
        if len(set(_key(atoms))) == 1 or len(found) < len(atoms):
            return ()
        places = {eqn.outvars.index(atom) for eqn, atom in zip(found, variables, strict=True)}
        kinds = set(map(operator_key, found))
        if len(places) > 1 or len(kinds) > 1 or any(eqn.effects for eqn in found):
            return ()
        return found if draws_alike_mapped(found[0]) and not self._related(found) else ()

    def _related(self, eqns: Sequence[JaxprEqn]) -> bool:
        """Return whether one of some equations depends on another, or is another."""
        first, some = min(self._places[eqn] for eqn in eqns), set(eqns)
        pending, seen = list(eqns), set(eqns)
        while pending:
            for atom in pending.pop().invars:
                maker = None if isinstance(atom, Literal) else self._makers.get(atom)
                if maker in some:
                    return True
                if maker is not None and maker not in seen and self._places[maker] > first:
                    seen.add(maker)
                    pending.append(maker)
        return len(some) < len(eqns)


def _key(atoms: Atoms) -> tuple[Hashable, ...]:
    return tuple(literal_key(one) if isinstance(one, Literal) else one for one in atoms)


def put_together(atoms: Atoms, result: Var) -> list[JaxprEqn]:
    """Return equations that stack values and literals of one type."""
    read = [atom for atom in atoms if isinstance(atom, Var)]

    def stack(*values: Array) -> Array:
        left = iter(values)
        return jnp.stack(
            [
                jnp.asarray(atom.val, dtype_of(atom)) if isinstance(atom, Literal) else next(left)
                for atom in atoms
            ]
        )

    return equations_of(stack, read, [result])


def over_rounds(var: Var, count: int) -> Var:
    """Return a new variable for the values of all rounds, [rounds, *value]."""
    return Var(array_type(var).update(shape=(count, *shape_of(var))))


def value_of_round(k: int, every: Array) -> Array:
    """Return the value of round `k` of those of all rounds, [rounds, *value]."""
    return lax.index_in_dim(every, k, keepdims=False)
