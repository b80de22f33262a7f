"""Tasks that are one program under several names.

Two tasks of a mesh share a program where their equations do the same in the same order with the
same constants, under the same strategies: they differ in the names of values only. So do token
slices of equal length of what does not look back on a prefix, the first and the last apart:
recurrences, sums and windows along the tokens. Slices of attention read prefixes of other lengths,
masks of other places and other rows of a table of positions, and have a program each.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np
from attrs import evolve

from alpa_meta.compat import Atom, ClosedJaxpr, Jaxpr, Literal, Var, consts, is_drop, open_jaxpr
from alpa_meta.execution.compiled_task import CompiledTask
from alpa_meta.identity import Identity


def with_shared_programs(tasks: Mapping[str, CompiledTask]) -> dict[str, CompiledTask]:
    """Return tasks of which those that are one program have one function, compiled once."""
    first: dict[Hashable, CompiledTask] = {}
    shared = {}
    for name, one in tasks.items():
        known = first.setdefault(_key(one), one)
        shared[name] = one if known is one else evolve(known, task=one.task, kinds=one.kinds)
    return shared


def _key(one: CompiledTask) -> Hashable:
    spec = one.task.spec
    return (
        spec.stage,  # whose conversions between layouts it may take
        program_key(one.closed),
        one.plan,
        one.donated,
        tuple(sorted((name, str(value)) for name, value in one.options.items())),
        one.executor,
        tuple(one.kinds.get(name) for name in (*spec.inputs, *spec.outputs)),
    )


def program_key(closed: ClosedJaxpr) -> Hashable:
    """Return what is equal for programs that are equal but for the names of their values."""
    return _jaxpr_key(open_jaxpr(closed)), tuple(map(_value_key, consts(closed)))


def _jaxpr_key(jaxpr: Jaxpr) -> Hashable:
    numbers: dict[Var, int] = {}

    def made(var: Var) -> Hashable:
        if is_drop(var):
            return None
        return numbers.setdefault(var, len(numbers)), _type(var)

    def read(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return _type(atom), _value_key(atom.val)
        return numbers[atom]

    inputs = tuple(map(made, (*jaxpr.constvars, *jaxpr.invars)))
    eqns = tuple(
        (
            eqn.primitive.name,
            tuple(map(read, eqn.invars)),
            tuple((name, _value_key(value)) for name, value in sorted(eqn.params.items())),
            tuple(map(made, eqn.outvars)),
        )
        for eqn in jaxpr.eqns
    )
    return len(jaxpr.constvars), inputs, eqns, tuple(map(read, jaxpr.outvars))


def _type(atom: Atom) -> Hashable:
    return str(atom.aval), bool(getattr(atom.aval, "weak_type", False))


def _value_key(value: object) -> Hashable:
    """Return what is equal for equal parameters and constants; itself where that is not known."""
    if isinstance(value, ClosedJaxpr):
        return program_key(value)
    if isinstance(value, Jaxpr):
        return _jaxpr_key(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_value_key, value))
    if isinstance(value, (bool, int, float, complex)):
        return type(value), repr(value)  # 1 is True, and 0.0 is -0.0
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return "array", value.shape, str(value.dtype), value.tobytes()
    return value if isinstance(value, Hashable) else Identity(value)
