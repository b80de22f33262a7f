"""The batch scaling of a step traced at one example, taken over from the same step at two.

A batch dim of one example has no factor in a sharding rule, and jax leaves out the sums over it: the
gradient of a bias that was broadcast over one example is the cotangent itself. The program at one
example is then the program at two without some reductions and reshapes:

    two examples   c = mul a b [2, 16]    d = reduce_sum c [16]    e = reshape d [1, 16]    f(e)
    one example    c = mul a b [1, 16]                                                      f(c)

Walking both, each value at one example gets the values at two that it stands for (c for c, d and e); its
scaling is that of the last of them that is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from alpa_meta.batch import CONSTANT, Scaling
from alpa_meta.compat import Literal, is_drop, open_jaxpr

_LEFT_OUT = frozenset({"reduce_sum", "reshape", "squeeze", "broadcast_in_dim", "transpose"})


def scaling_of_one(one: Any, two: Any, known: Mapping[Any, Scaling]) -> dict[Any, Scaling] | None:
    """Return the scaling of every variable of `one`, given that of `two`; None if they do not match."""
    own, twin = open_jaxpr(one), open_jaxpr(two)
    images: dict[Any, list[Any]] = {
        var: [other]
        for var, other in zip(
            [*own.invars, *own.constvars], [*twin.invars, *twin.constvars], strict=True
        )
    }
    stands_for = {image[0]: var for var, image in images.items()}
    last: dict[Any, Any] = {var: image[0] for var, image in images.items()}

    def read(atoms: Any, others: Any) -> bool:
        if len(atoms) != len(others):
            return False
        pairs = [
            (atom, other)
            for atom, other in zip(atoms, others, strict=True)
            if not isinstance(atom, Literal)
        ]
        if any(isinstance(other, Literal) or other not in images[atom] for atom, other in pairs):
            return False
        for atom, other in pairs:
            if images[atom].index(other) > images[atom].index(last[atom]):
                last[atom] = other
        return True

    following: Iterator[Any] = iter(twin.eqns)
    for eqn in own.eqns:
        for other in following:
            if (
                other.primitive is eqn.primitive
                and len(eqn.outvars) == len(other.outvars)
                and read(eqn.invars, other.invars)
            ):
                break
            if not _leave_out(other, stands_for, images):
                return None
        else:
            return None
        for var, other_var in zip(eqn.outvars, other.outvars, strict=True):
            if not is_drop(var):
                images[var], last[var] = [other_var], other_var
                stands_for[other_var] = var
    for other in following:
        if not _leave_out(other, stands_for, images):
            return None
    if not read(own.outvars, twin.outvars):
        return None
    return {var: known.get(image, CONSTANT) for var, image in last.items()}


def _leave_out(eqn: Any, stands_for: dict[Any, Any], images: dict[Any, list[Any]]) -> bool:
    """Note that one example does without `eqn`; False if it is of a kind that cannot be left out."""
    if eqn.primitive.name not in _LEFT_OUT or isinstance(eqn.invars[0], Literal):
        return False
    var = stands_for.get(eqn.invars[0])
    if var is None:
        return False
    images[var].append(eqn.outvars[0])
    stands_for[eqn.outvars[0]] = var
    return True
