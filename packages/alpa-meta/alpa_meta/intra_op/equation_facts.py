"""What the walk over a stage asks of every equation, on every mesh, found once."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from alpa_meta.compat import JaxprEqn, Literal, Var, shape_of
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.intra_op.dim_orders import Matrix
from alpa_meta.operators.contraction import product_matrices
from alpa_meta.operators.convolution import host_orders
from alpa_meta.operators.layout import permutation
from alpa_meta.operators.regions import is_region
from alpa_meta.program_caches import cached_by_program
from alpa_meta.types import HostArray


@frozen(eq=False)
class EquationFacts:
    """What the walk asks of an equation that depends on neither the mesh nor the stage."""

    region: bool
    reads: tuple[Var, ...]
    read_at: tuple[int, ...]  # the operand that each of them is
    zero: bool  # an operand is the number 0
    results: tuple[tuple[tuple[int, ...], float], ...]  # shape and bytes
    permutation: tuple[int, ...] | None  # of a transposition
    matrices: tuple[Matrix, ...]  # how a product takes each of `reads`
    on_host: tuple[Matrix, ...]  # how CPUs take each, of a convolution too


@cached_by_program(1 << 17)
def facts_of(eqn: JaxprEqn) -> EquationFacts:
    """Return the facts of an equation, remembered."""
    reads = [(k, atom) for k, atom in enumerate(eqn.invars) if not isinstance(atom, Literal)]
    matrices = product_matrices(eqn)
    on_host = matrices or [(order, (), ()) for order in host_orders(eqn)]
    return EquationFacts(
        region=is_region(eqn),
        reads=tuple(atom for _, atom in reads),
        read_at=tuple(k for k, _ in reads),
        zero=any(isinstance(atom, Literal) and _is_zero(atom.val) for atom in eqn.invars),
        results=tuple((shape_of(var), tensor_bytes(var)) for var in eqn.outvars),
        permutation=permutation(eqn),
        matrices=tuple(matrices[k] for k, _ in reads) if matrices else (),
        on_host=tuple(on_host[k] for k, _ in reads) if on_host else (),
    )


def _is_zero(value: HostArray | complex) -> bool:
    return not np.any(np.asarray(value))
