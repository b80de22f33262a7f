"""What arrays the tasks of a worker take and give."""

from __future__ import annotations

from typing import TypeAlias

import jax
import numpy as np
from attrs import frozen

from mesh_runtime.layout import Layout


@frozen
class ArrayType:
    """The shape, dtype and layout of an array of a mesh."""

    shape: tuple[int, ...]
    dtype: str
    layout: Layout

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return int(np.prod(self.shape, dtype=np.int64)) * jax.numpy.dtype(self.dtype).itemsize


TaskTypes: TypeAlias = dict[str, tuple[list[ArrayType], list[ArrayType]]]
"""What each task takes and gives."""
