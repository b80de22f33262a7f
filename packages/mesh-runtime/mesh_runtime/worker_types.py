"""What arrays the tasks of a worker take and give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from attrs import frozen
from jax.sharding import NamedSharding

from alpa_interchange.reshard import PlacedTensor
from mesh_runtime.layout import Layout, plain_spec
from mesh_runtime.task_programs import LoadedProgram


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


def layout_of(placed: PlacedTensor) -> Layout:
    """Return the layout of a side of a resharding task."""
    spec = tuple(axes if axes else None for axes in placed.spec.dims)
    return Layout(placed.mesh_shape, placed.axis_names, spec)


def types_of(program: LoadedProgram, grid: Layout) -> tuple[list[ArrayType], list[ArrayType]]:
    """Return what a program takes and gives; of a layout that XLA chose and no spec says, `grid`
    stands for it."""

    def types(avals: Sequence[Any], shardings: Sequence[Any]) -> list[ArrayType]:
        found = []
        for aval, sharding in zip(avals, shardings, strict=True):
            layout = grid
            if isinstance(sharding, NamedSharding):
                mesh = sharding.mesh
                spec = plain_spec(sharding.spec, "the exported program")
                layout = Layout(mesh.axis_sizes, mesh.axis_names, spec)
            found.append(ArrayType(aval.shape, str(aval.dtype), layout))
        return found

    made = program.compiled.output_shardings
    return types(program.in_avals, program.in_shardings), types(program.out_avals, made)
