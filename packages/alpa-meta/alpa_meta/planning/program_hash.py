"""A hash of a traced program that is equal in every process: of what it does, and of no address.

Hashed are, in program order: primitives, parameters, types, name stacks, and which value each
equation reads, by the position of what made it; with `values` also what literals and constants
hold. Parameters are taken apart: jaxprs, containers, attrs and data classes by their parts,
functions by their names and, with `values`, their code, all else by `repr` without addresses.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
import types
from collections.abc import Callable, Mapping

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from alpa_meta.compat import ClosedJaxpr, Jaxpr, Literal, Var, closed, consts, name_stack
from alpa_meta.identity import Identity
from alpa_meta.types import PyTree

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_MOST_NESTED = 32  # classes inside classes: a parameter that refers to itself is cut off here


def program_hash(program: ClosedJaxpr | Jaxpr, *, values: bool) -> str:
    """Return the hash of a program; without `values`, constants count by their types only."""
    return _Hasher(values).jaxpr(program)


def text_of(value: object) -> str:
    """Return a text that is equal in every process for equal values, as those of parameters."""
    return _Hasher(values=True).part(value)


class _Hasher:
    def __init__(self, values: bool) -> None:
        self._values = values
        self._types: Callable[[object], str] = functools.cache(_type)
        self._known: dict[ClosedJaxpr | Jaxpr, str] = {}
        self._functions: dict[Identity, str] = {}

    def jaxpr(self, program: ClosedJaxpr | Jaxpr) -> str:
        if program not in self._known:
            self._known[program] = self._hashed(program)
        return self._known[program]

    def _hashed(self, program: ClosedJaxpr | Jaxpr) -> str:
        whole = closed(program)
        jaxpr = getattr(whole, "jaxpr", whole)
        digest = hashlib.sha256()
        numbers: dict[Var, int] = {}

        def made(variables: list[Var]) -> list[str]:
            for var in variables:
                numbers[var] = len(numbers)
            return [self._types(var.aval) for var in variables]

        def read(atom: Var | Literal) -> str:
            if not isinstance(atom, Literal):
                return str(numbers[atom])
            return f"{self._types(atom.aval)}={self._value(atom.val)}"

        digest.update(repr((made(jaxpr.constvars), made(jaxpr.invars))).encode())
        digest.update(repr([self._value(value) for value in consts(whole)]).encode())
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            params = self.part(eqn.params)
            line = (eqn.primitive.name, name_stack(eqn), operands, params, made(eqn.outvars))
            digest.update(repr(line).encode())
        digest.update(repr([read(atom) for atom in jaxpr.outvars]).encode())
        return digest.hexdigest()

    def _value(self, value: PyTree) -> str:
        """Return what stands for a constant."""
        if not self._values:
            return ""
        if jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.extended):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"

    def part(self, value: object, depth: int = 0) -> str:
        """Return what stands for a parameter, or for a part of one."""
        part = functools.partial(self.part, depth=depth + 1)
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            return self.jaxpr(value)
        if isinstance(value, (np.ndarray, jax.Array)):
            return f"{value.dtype}{value.shape}{self._value(value)}"
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, enum.Enum)):
            return repr(value)
        if depth > _MOST_NESTED:
            return type(value).__qualname__
        if isinstance(value, Mapping):
            return repr(sorted((str(key), part(one)) for key, one in value.items()))
        if isinstance(value, (tuple, list)):
            return f"{type(value).__name__}{[part(one) for one in value]}"
        if isinstance(value, (set, frozenset)):
            return repr(sorted(part(one) for one in value))
        if isinstance(value, functools.partial):
            return part((value.func, value.args, value.keywords))
        if isinstance(value, types.CodeType):
            return f"{value.co_code.hex()} {value.co_names} {part(value.co_consts)}"
        if isinstance(value, type) or callable(value) and hasattr(value, "__qualname__"):
            return self._function(value, depth)
        fields = _field_names(type(value))
        if fields is not None:
            members = {name: getattr(value, name, None) for name in fields}
            return f"{type(value).__qualname__}{part(members)}"
        return _ADDRESS.sub("", repr(value))

    def _function(self, value: PyTree, depth: int) -> str:
        """Return the name of a function or class, and its code; of one inside itself the name."""
        name = f"{getattr(value, '__module__', None)}.{value.__qualname__}"
        code = getattr(value, "__code__", None) if self._values else None
        if code is None:
            return name
        key = Identity(value)
        if key not in self._functions:
            self._functions[key] = name
            inside = self.part((code, _closure(value)), depth + 1)
            self._functions[key] = f"{name} {inside}"
        return self._functions[key]


def _closure(function: PyTree) -> list[object]:
    """Return what a function closes over and its defaults, as far as it is plain or a function."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    plain = (bool, int, float, complex, str, bytes, tuple, np.ndarray, types.FunctionType)
    kept = [*cells, *(function.__defaults__ or ())]
    return [one if isinstance(one, plain) else type(one).__qualname__ for one in kept]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _field_names(kind: type) -> list[str] | None:
    """Return the fields of an attrs or data class, None for any other."""
    if attrs.has(kind):
        return [one.name for one in attrs.fields(kind)]
    if dataclasses.is_dataclass(kind):
        return [one.name for one in dataclasses.fields(kind)]
    return None


def _type(aval: object) -> str:
    """Return shape, dtype and weak type; of what is no array, its text."""
    weak = "~" if getattr(aval, "weak_type", False) else ""
    return weak + _ADDRESS.sub("", str(aval))
