"""The batch scaling of a step traced at one example, taken over from the same step at two.

A batch dim of one example has no factor in a sharding rule, and jax leaves out the sums over it, or
sums over it and puts it back. The two programs then differ by reductions and reshapes only:

    two examples   c = mul a b [2, 16]    d = reduce_sum c [16]    e = reshape d [1, 16]    f(e)
    one example    c = mul a b [1, 16]                                                      f(c)

Walking both, each value at one example gets the values at two that it stands for (c for c, d and
e); its scaling is that of the last of them that is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from alpa_meta.compat import Literal, is_drop, open_jaxpr
from alpa_meta.microbatch.scaling import CONSTANT, MIXED, Scaling
from alpa_meta.operators import operator_of


def scaling_of_one(
    one: Any, two: Any, known: Mapping[Any, Scaling]
) -> tuple[dict[Any, Scaling], dict[int, int]] | None:
    """Return the scaling of every variable of `one`, given that of `two`, and the equal equations.

    Equations are given by position; None if the programs do not match.
    """
    own, twin = open_jaxpr(one), open_jaxpr(two)
    walk = _Walk(dict(zip(own.invars, twin.invars)) | dict(zip(own.constvars, twin.constvars)))
    pairs: dict[int, int] = {}
    position = 0
    for number, eqn in enumerate(own.eqns):
        while True:
            other = twin.eqns[position] if position < len(twin.eqns) else None
            if other is not None and walk.same(eqn, other):
                pairs[number] = position
                position += 1
                break
            if walk.reshapes_only(eqn):
                break
            if other is None or not walk.left_out(other):
                return None
            position += 1
    for other in twin.eqns[position:]:
        if not walk.left_out(other):
            return None
    if not walk.read(own.outvars, twin.outvars):
        return None
    return {var: _taken_over(var, image, known) for var, image in walk.last.items()}, pairs


def _taken_over(var: Any, image: Any, known: Mapping[Any, Scaling]) -> Scaling:
    scaling = known.get(image, CONSTANT)
    same_rank = len(_shape(var)) == len(_shape(image))
    return scaling if scaling.form != "example" or same_rank else MIXED


class _Walk:
    """The values at two examples that each value at one stands for, in the order they were made."""

    def __init__(self, inputs: Mapping[Any, Any]) -> None:
        self.images: dict[Any, list[Any]] = {var: [image] for var, image in inputs.items()}
        self.last: dict[Any, Any] = dict(inputs)  # the last image that was read
        self._owner: dict[Any, Any] = {image: var for var, image in inputs.items()}

    def read(self, atoms: Sequence[Any], others: Sequence[Any]) -> bool:
        """Return whether operands at two examples are what those at one stand for; note it."""
        if len(atoms) != len(others):
            return False
        pairs = [
            (atom, other)
            for atom, other in zip(atoms, others, strict=True)
            if not isinstance(atom, Literal)
        ]
        if any(isinstance(other, Literal) for _, other in pairs):
            return False
        if any(other not in self.images[atom] for atom, other in pairs):
            return False
        for atom, other in pairs:
            images = self.images[atom]
            if images.index(other) > images.index(self.last[atom]):
                self.last[atom] = other
        return True

    def same(self, eqn: Any, other: Any) -> bool:
        """Return whether two equations are the same operation, and pair their results."""
        if other.primitive is not eqn.primitive or len(eqn.outvars) != len(other.outvars):
            return False
        pairs = list(zip(eqn.outvars, other.outvars, strict=True))
        if not all(_alike(_shape(var), _shape(image)) for var, image in pairs):
            return False
        if not self.read(eqn.invars, other.invars):
            return False
        for var, image in pairs:
            if not is_drop(var):
                self.images[var], self.last[var] = [image], image
                self._owner[image] = var
        return True

    def reshapes_only(self, eqn: Any) -> bool:
        """Return whether an equation at one example only adds or drops the dim of size one."""
        source = eqn.invars[0] if eqn.invars else None
        if not operator_of(eqn).layout or isinstance(source, Literal):
            return False
        (var,) = eqn.outvars
        if math.prod(_shape(source)) != math.prod(_shape(var)):
            return False
        self.images[var] = self.images[source]
        self.last[var] = self.last[source]
        for image in self.images[var]:
            self._owner[image] = var
        return True

    def left_out(self, eqn: Any) -> bool:
        """Return whether one example does without an equation at two, and note what it makes."""
        operator = operator_of(eqn)
        sums = operator.reorders and len(eqn.invars) == 1
        if not (operator.layout or sums) or isinstance(eqn.invars[0], Literal):
            return False
        var = self._owner.get(eqn.invars[0])
        if var is None:
            return False
        self.images[var].append(eqn.outvars[0])
        self._owner[eqn.outvars[0]] = var
        return True


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _alike(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    """Return whether shapes agree up to the batch dim: kept (1 for 2) or dropped."""
    if len(one) == len(two):
        return all(a == b or (a, b) == (1, 2) for a, b in zip(one, two, strict=True))
    here, there = [d for d in one if d != 1], [d for d in two if d != 1]
    return here == there or any(
        size == 2 and there[:k] + there[k + 1 :] == here for k, size in enumerate(there)
    )
