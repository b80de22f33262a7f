"""Work of one equation, not sharded: floating-point operations and bytes moved.

Records of operators say by these functions what the factors of their rule do not. Bytes of
elementwise operators are those of their results only, since the compiler fuses them with what
produces their operands.
"""

from __future__ import annotations

import math

from alpa_meta.compat import Atom, JaxprEqn, shape_of
from alpa_meta.operators.operator import CountFunction, operand_shapes, result_shapes


def nothing(_: JaxprEqn) -> float:
    """Return 0: XLA folds the operator into its readers, or it moves nothing."""
    return 0.0


def result_elements(eqn: JaxprEqn) -> float:
    """Return one operation per element of the results."""
    return float(sum(math.prod(shape) for shape in result_shapes(eqn)))


def operand_elements(operand: int) -> CountFunction:
    """Return the count of one operation per element of an operand."""
    return lambda eqn: float(math.prod(operand_shapes(eqn)[operand]))


def result_bytes(eqn: JaxprEqn) -> float:
    """Return the bytes of the results."""
    return sum(_bytes(var) for var in eqn.outvars)


def all_bytes(eqn: JaxprEqn) -> float:
    """Return the bytes of operands and results."""
    return result_bytes(eqn) + sum(_bytes(atom) for atom in eqn.invars)


def copied_results(eqn: JaxprEqn) -> float:
    """Return the bytes of reading and writing what the results hold."""
    return 2 * result_bytes(eqn)


def operand_bytes(operand: int, times: int) -> CountFunction:
    """Return the count of the bytes of one operand, read or written so many times."""
    return lambda eqn: times * _bytes(eqn.invars[operand])


def _bytes(atom: Atom) -> float:
    dtype = getattr(atom.aval, "dtype", None)
    return 0.0 if dtype is None else float(math.prod(shape_of(atom)) * dtype.itemsize)
