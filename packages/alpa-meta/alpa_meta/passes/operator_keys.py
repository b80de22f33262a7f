"""Keys of operators: equal for equations that make the same results of the same operands."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    consts,
    dtype_name,
    open_jaxpr,
    shape_of,
)
from alpa_meta.identity import Identity
from alpa_meta.program_caches import cached_by_program


@cached_by_program(1 << 17)
def operator_key(eqn: JaxprEqn) -> Hashable:
    """Return what an equation computes of its operands; bodies count by what they compute."""
    types = tuple(type_key(atom) for atom in (*eqn.invars, *eqn.outvars))
    params = tuple((name, _value(eqn.params[name])) for name in sorted(eqn.params))
    return eqn.primitive.name, len(eqn.invars), types, params


def type_key(atom: Atom) -> Hashable:
    """Return the shape and the name of the dtype of an operand or a result."""
    return shape_of(atom), dtype_name(getattr(atom.aval, "dtype", ""))


def literal_key(atom: Literal) -> Hashable:
    """Return what is equal for literals of one type and value."""
    value = np.asarray(atom.val)
    known = value.tobytes() if value.dtype != object else Identity(atom.val)
    return "literal", type_key(atom), known


def _value(value: object) -> Hashable:
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        return _body(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_value, value))
    try:
        hash(value)
    except TypeError:
        return Identity(value)
    return value


def _body(body: Jaxpr | ClosedJaxpr) -> Hashable:
    jaxpr = open_jaxpr(body)
    numbers: dict[Var, int] = {}
    for var in (*jaxpr.constvars, *jaxpr.invars):
        numbers[var] = len(numbers)
    eqns = []
    for eqn in jaxpr.eqns:
        eqns.append((operator_key(eqn), tuple(_operand(atom, numbers) for atom in eqn.invars)))
        for var in eqn.outvars:
            numbers[var] = len(numbers)
    results = tuple(_operand(atom, numbers) for atom in jaxpr.outvars)
    return tuple(map(type_key, numbers)), tuple(map(Identity, consts(body))), tuple(eqns), results


def _operand(atom: Atom, numbers: Mapping[Var, int]) -> Hashable:
    return literal_key(atom) if isinstance(atom, Literal) else numbers[atom]
