"""Tensors and how they are sharded."""

from __future__ import annotations

import math
import re

from attrs import frozen

_NUMBERS = re.compile(r"u?int(1|2|4|8|16|32|64)|float(0|16|32|64)|float(4|6|8)_\w+")
_BITS = {"bool": 8, "bfloat16": 16, "complex64": 64, "complex128": 128}
_BITS |= {"key<fry>": 64, "key<rbg>": 128, "key<urbg>": 128}  # random keys


def dtype_bytes(dtype: str) -> float:
    """Return the bytes of one element of `dtype` ("float32", "int4", "bfloat16",
    "float8_e4m3fn")."""
    if dtype in _BITS:
        return _BITS[dtype] / 8
    found = _NUMBERS.fullmatch(dtype)
    if found is None:
        raise ValueError(
            f"dtype {dtype!r} has no known size; it must be one of jax, such as float32, bfloat16, "
            "int4 or float8_e4m3fn"
        )
    return int(found[1] or found[2] or found[3]) / 8


@frozen
class TensorType:
    """Shape and element type of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        return self.size * dtype_bytes(self.dtype)


@frozen(cache_hash=True)
class ShardingSpec:
    """Mesh axes per tensor dim, major to minor, plus the axes over which it is an unreduced sum.

    `ShardingSpec((("x",), ()))` shards dim 0 over axis x. With `partial=("y",)` the value is the
    sum (or the named `reduction`) over y of what the devices hold.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        used = [axis for dim in self.dims for axis in dim] + list(self.partial)
        if len(set(used)) != len(used):
            raise ValueError(f"ShardingSpec uses a mesh axis twice: {self}")

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the mesh axes that it uses."""
        return (*(axis for dim in self.dims for axis in dim), *self.partial)

    def __str__(self) -> str:
        text = ", ".join("+".join(axes) if axes else "·" for axes in self.dims)
        return f"[{text}]" + (f" partial({'+'.join(self.partial)})" if self.partial else "")

    @staticmethod
    def replicated(rank: int) -> ShardingSpec:
        """Return the spec that keeps a tensor of `rank` dims whole on every device."""
        return ShardingSpec(((),) * rank)
