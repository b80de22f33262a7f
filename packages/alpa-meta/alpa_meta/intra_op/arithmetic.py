"""The arithmetic that a product asks for: its operands' dtype, precision and result dtype.

`jax.default_matmul_precision`, as a context or as configured, is what jax writes into an equation
whose `precision` is not given; it is therefore read at the time the step is traced.
"""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
from jax import lax

from alpa_meta.compat import JaxprEqn, dtype_name
from alpa_meta.operators import kernel_kind
from alpa_meta.types import DType
from cost_model import product_arithmetic


def arithmetic(eqn: JaxprEqn, platform: str) -> tuple[str, int]:
    """Return (dtype whose peak flop/s hold, passes over the operands) of an equation."""
    if not eqn.invars:
        return "float32", 1
    operands: list[DType | None] = [getattr(atom.aval, "dtype", None) for atom in eqn.invars[:2]]
    if "precision" not in eqn.params:
        # a kernel of the user's that multiplies matrices does so by jax's default
        product = kernel_kind(eqn) == "matmul"
        dtype = dtype_name(operands[0])
        return product_arithmetic(dtype, "default", platform) if product else (dtype, 1)
    asked = eqn.params["precision"]
    if isinstance(asked, lax.DotAlgorithm):
        return dtype_name(jnp.dtype(asked.lhs_precision_type)), asked.num_primitive_operations
    wider = jnp.promote_types(*cast(list[DType], operands))
    wanted = eqn.params.get("preferred_element_type")
    # XLA widens operands to a result of another kind or of double width, not bfloat16 to float32
    if wanted is not None and jnp.dtype(wanted).itemsize > 4:
        wider = jnp.promote_types(wider, wanted)
    return product_arithmetic(dtype_name(wider), _precision(asked), platform)


def _precision(asked: object) -> str:
    """Return the precision of a product as cost-model names it; of two, the higher counts."""
    if asked is None:
        return "default"
    if isinstance(asked, lax.DotAlgorithmPreset):
        return "default" if asked is lax.DotAlgorithmPreset.DEFAULT else asked.name
    order = list(lax.Precision)
    both = asked if isinstance(asked, tuple) else (asked,)
    return str(max(both, key=order.index).name).lower()
