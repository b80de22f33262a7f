"""What a worker is given to load and to do, and what arrays its tasks take and give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from attrs import evolve, field, frozen
from jax.sharding import NamedSharding

from alpa_interchange.document import to_json
from alpa_interchange.reshard import PlacedTensor
from alpa_interchange.schedule import PipelineSchedule
from mesh_runtime.driver_memory import MappedShare
from mesh_runtime.host_batches import HostRead
from mesh_runtime.layout import HostTiles, Layout, plain_spec
from mesh_runtime.runtime import Executable
from mesh_runtime.task_programs import LoadedProgram


@frozen(kw_only=True)
class WorkerProgram:
    """What a worker gets at load, all of it plain data.

    `plan` is a hash of all that was loaded, on this mesh and the others; steps and messages name
    it. The rest is of the worker's mesh alone: of 64 meshes, the lists of all have 15 MB.
    """

    plan: str
    schedule: str  # JSON of a PipelineSchedule, whose only list is that of the mesh
    executables: Mapping[str, Executable]  # callables only where they are of the same process
    layouts: Mapping[str, Layout]  # by value
    timeout: float  # seconds a step may wait for another worker


@frozen(kw_only=True)
class WorkerStep:
    """What one host does in a step: which arrays it reads, and which it keeps or sends back.

    `bound` and `kept` are numbers of arrays by buffer name, `placed` this host's share of arrays
    that come with the step, `reads` what this host reads of batches itself, `returned` the outputs
    whose tiles go to the driver, `stacked` those whose parts of so many microbatches go there as
    one, `released` numbers of arrays that nobody refers to any more.
    `shared` are the names of shares that several hosts are given, and that come beside this.
    """

    plan: str
    number: int
    bound: Mapping[str, int]
    placed: Mapping[str, HostTiles | MappedShare]
    kept: Mapping[str, int]
    returned: tuple[str, ...]
    stacked: Mapping[str, int] = field(factory=dict)
    reads: Mapping[str, HostRead] = field(factory=dict)
    released: tuple[int, ...] = ()
    trace: str = "none"
    shared: tuple[str, ...] = ()


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


def own_list(schedule: PipelineSchedule, mesh: int) -> str:
    """Return what `WorkerProgram.schedule` holds for a mesh."""
    return to_json(evolve(schedule, programs=(schedule.programs[mesh],)))


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
