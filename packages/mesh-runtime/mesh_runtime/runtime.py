"""The protocol every runtime follows, and the errors they raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_interchange.schedule import PipelineSchedule
from mesh_runtime.trace import TraceEvent

Executable: TypeAlias = Callable[..., Sequence[jax.Array]] | bytes
ValueShardings: TypeAlias = Sequence[Mapping[str, NamedSharding | PartitionSpec]]


class StepError(RuntimeError):
    """A step failed; the message names the mesh, the instruction and the reason."""


class WorkerError(StepError):
    """A worker process died or stopped answering; the message names its mesh and host."""


class Runtime(Protocol):
    """Meshes that hold arrays and execute a pipeline schedule, one step at a time.

    A buffer is named `value` (once per step) or `value@microbatch`. A runtime keeps *resident*
    buffers (state) on the meshes between steps; batch buffers and everything computed are dropped
    after a step unless an output is carried back to an input.
    """

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
        donated: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Install a schedule: from now on `step` executes it.

        `executables[task]` is called with the buffers of a run in the order of its `inputs` and
        returns those of its `outputs`; bytes are a program serialised by `jax.export`.
        `shardings[mesh][value]` is the layout of an input or received value there. After each step
        the buffer `k` takes the place of the input `j` for every `carry[k] = j`, without leaving
        its devices; `outputs` are handed back by `step`. `donated[task]` names input values that an
        exported program may overwrite (callables donate by themselves).
        """
        ...

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Make `inputs` resident on every mesh whose program reads them before it writes them."""
        ...

    def step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Execute the schedule once on the resident buffers and `batch`; return the outputs."""
        ...

    def fetch(self, names: Iterable[str]) -> dict[str, Any]:
        """Return resident buffers by name."""
        ...

    def close(self) -> None:
        """Drop every buffer and end every process of the runtime; it cannot be used afterwards."""
        ...
