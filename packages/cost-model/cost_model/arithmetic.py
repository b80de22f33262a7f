"""Which arithmetic a product runs in: not its operands' dtype alone.

XLA computes a float32 product in tensorfloat32 on NVIDIA GPUs and in one bfloat16 pass on TPUs
unless it is asked for more (`jax.lax.Precision`):

    precision   GPU             TPU                                  CPU
    default     tensorfloat32   bfloat16                             float32
    high        tensorfloat32   3 bfloat16 passes ("tensorfloat32")  float32
    highest     float32         6 bfloat16 passes ("float32")        float32

The names are those of `DeviceSpec.peak_flops`. Other dtypes run as they are.
"""

from __future__ import annotations

import re

PRECISIONS = ("default", "high", "highest")
"""What may be asked of a product, besides the name of a dot algorithm ("BF16_BF16_F32_X3")."""

_FLOAT32 = {
    "gpu": {"default": "tensorfloat32", "high": "tensorfloat32", "highest": "float32"},
    "tpu": {"default": "bfloat16", "high": "tensorfloat32", "highest": "float32"},
    "cpu": dict.fromkeys(PRECISIONS, "float32"),
}
_ALGORITHM = re.compile(r"(?P<operand>[A-Z0-9]+)_.*?(_X(?P<passes>\d+))?")
_OPERANDS = {"TF32": "tensorfloat32", "BF16": "bfloat16"} | {
    f"F{bits}": f"float{bits}" for bits in (16, 32, 64)
}


def product_arithmetic(dtype: str, precision: str, platform: str) -> tuple[str, int]:
    """Return (the dtype whose peak holds, passes over the operands) of a product.

    `dtype` is the operands', `platform` "gpu", "tpu" or "cpu". A CPU, as a platform unknown here,
    computes in the operands' dtype whatever is asked.
    """
    if precision in PRECISIONS:
        return (
            _FLOAT32.get(platform, _FLOAT32["cpu"])[precision] if dtype == "float32" else dtype
        ), 1
    matched = _ALGORITHM.fullmatch(precision)
    if matched is None:
        raise ValueError(
            f"precision must be one of {PRECISIONS} or a dot algorithm such as 'BF16_BF16_F32_X3', "
            f"got {precision!r}"
        )
    if platform not in ("gpu", "tpu"):
        return dtype, 1
    return _OPERANDS.get(matched["operand"], dtype), int(matched["passes"] or 1)
