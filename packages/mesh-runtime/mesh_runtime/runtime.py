"""The protocol every runtime follows, and the errors they raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_interchange.schedule import PipelineSchedule
from mesh_runtime.exported import ExportedProgram
from mesh_runtime.remote_array import RemoteArray
from mesh_runtime.trace import TraceEvent

Executable: TypeAlias = Callable[..., Sequence[jax.Array]] | ExportedProgram
Array: TypeAlias = jax.Array | RemoteArray
ValueShardings: TypeAlias = Sequence[Mapping[str, NamedSharding | PartitionSpec]]


class StepError(RuntimeError):
    """A step failed; the message names the mesh, the instruction and the reason."""


class WorkerError(StepError):
    """A worker process died or stopped answering; the message names its mesh and host."""


class NoRoomError(WorkerError):
    """The cluster has no room for the processes of the meshes."""


class Runtime(Protocol):
    """Meshes that hold arrays and execute a pipeline schedule, one step at a time.

    A buffer is named `value` (once per step) or `value@microbatch`. What `place`, `init` and `step`
    return are arrays that live on the meshes: jax arrays in one process, handles (`RemoteArray`)
    where the meshes are other processes; both may be given to `step`. *Resident* buffers (state)
    are held by the runtime, under their names, from one step to the next.
    """

    @property
    def trace_mode(self) -> str:
        """How steps are traced: one of `TRACE_MODES`."""
        ...

    @trace_mode.setter
    def trace_mode(self, mode: str) -> None: ...

    @property
    def trace(self) -> tuple[TraceEvent, ...]:
        """The events of the last step; empty unless the runtime was asked to trace."""
        ...

    def load(
        self,
        schedule: PipelineSchedule,
        executables: Mapping[str, Executable],
        shardings: ValueShardings,
        *,
        outputs: Iterable[str] = (),
        carry: Mapping[str, str] | None = None,
        joined: Mapping[str, int] | None = None,
    ) -> None:
        """Install a schedule: from now on `step` executes it.

        `executables[task]` is called with the buffers of a run in the order of its `inputs` and
        returns those of its `outputs`. `shardings[mesh][value]` is the layout of an input or
        received value there. For every `carry[k] = j` the buffer `k` is, after each step, where and
        as the input `j` is read, and takes the place of a resident `j`; `outputs` are handed back
        by `step`, and so are values of which every microbatch makes a part, `joined[value]` being
        the dim along which the parts follow each other.
        """
        ...

    def init(
        self, programs: Mapping[int, Executable], arguments: Sequence[Any]
    ) -> dict[int, list[Array]]:
        """Return what a program makes of `arguments` on each mesh: how state is born there."""
        ...

    def place(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Return `inputs` on the meshes whose programs read them first, laid out as they read."""
        ...

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Make `inputs` resident on every mesh whose program reads them before it writes them."""
        ...

    def step(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """Execute the schedule once on the resident buffers and `batch`; return the outputs.

        A value that every microbatch reads rows of may be given whole, under its name without "@":
        the rows are dealt out evenly, in order. `batch` may hold state as well, which is then not
        resident: arrays that came from here stay where they are, and are gone if the step
        overwrites them.
        """
        ...

    def fetch(self, names: Iterable[str]) -> dict[str, Any]:
        """Return resident buffers by name."""
        ...

    def close(self) -> None:
        """Drop every buffer and end every process of the runtime; it cannot be used afterwards."""
        ...
