"""Memory of a compiled program against what was predicted.

Of a task, the arguments are compared with the sizes its plan gives them on each device, and the
peak (arguments, fresh results and temporaries together) with the memory planned for its whole
stage: state, gradients, kept activations and temporaries, and the task's part of the batch. XLA
states argument, output and alias sizes exactly on every backend. Its temporary size is the real
arena on GPUs; on CPU it ignores recomputation, so there it is shown and not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

import jax
from attrs import frozen

from alpa_meta.audit.report import format_bytes

if TYPE_CHECKING:
    from alpa_meta.execution.compiled_task import CompiledTask

TOLERANCE = 0.10
"""Relative excess over the predicted peak that is let pass."""

WORKSPACE = 32 << 20
"""Bytes that XLA sets aside for cuBLAS on H100s, however small the program (on A100s 4 MiB)."""


@frozen(kw_only=True)
class MemoryCheck:
    """Bytes per device, compiled and predicted; a prediction of None is not judged."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    predicted_argument_bytes: float | None = None
    predicted_peak_bytes: float | None = None
    judge_peak: bool = True

    @property
    def peak_bytes(self) -> int:
        """Arguments, results that are not written over arguments, and temporaries."""
        fresh = max(self.output_bytes - self.alias_bytes, 0)
        return self.argument_bytes + fresh + self.temporary_bytes

    @property
    def ok(self) -> bool:
        """Whether neither arguments nor peak exceed the prediction by more than the tolerance; the
        peak may have a workspace more."""
        arguments = self.predicted_argument_bytes
        if arguments is not None and self.argument_bytes > arguments * (1 + TOLERANCE):
            return False
        peak = self.predicted_peak_bytes
        judged = self.judge_peak and peak is not None
        return not judged or self.peak_bytes <= (peak or 0.0) * (1 + TOLERANCE) + WORKSPACE

    def text(self) -> str:
        """Return one line for people."""
        shown = [
            f"arguments {_beside(self.argument_bytes, self.predicted_argument_bytes)}",
            f"peak {_beside(self.peak_bytes, self.predicted_peak_bytes)}",
        ]
        note = "" if self.judge_peak else "; this backend's temporaries are not judged"
        return f"memory per device: {', '.join(shown)}{note}{'' if self.ok else ': TOO MUCH'}"


def memory_check(
    compiled: jax.stages.Compiled,
    *,
    predicted_argument_bytes: float | None = None,
    predicted_peak_bytes: float | None = None,
    judge_peak: bool = True,
) -> MemoryCheck:
    """Return the check of a `jax.stages.Compiled` by its `memory_analysis()`."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return MemoryCheck(
        argument_bytes=int(analysis.argument_size_in_bytes),
        output_bytes=int(analysis.output_size_in_bytes),
        alias_bytes=int(analysis.alias_size_in_bytes),
        temporary_bytes=int(analysis.temp_size_in_bytes),
        predicted_argument_bytes=predicted_argument_bytes,
        predicted_peak_bytes=predicted_peak_bytes,
        judge_peak=judge_peak,
    )


def task_memory(
    task: CompiledTask,
    stage_memory: Mapping[str, float],
    batch_paths: Set[str],
    host_paths: Set[str] = frozenset(),
    *,
    judge_peak: bool = True,
) -> MemoryCheck:
    """Return the check of a compiled task by its own plan and its stage's memory, bytes by name.

    What the plan keeps on the host (`host_paths`) is on the devices where those are only described.
    """
    sizes = [_bytes_per_device(shape) for shape in task.arguments()]
    beside = batch_paths | (host_paths - task.kinds.keys())
    batch = sum(
        size for name, size in zip(task.task.spec.inputs, sizes, strict=True) if name in beside
    )
    return memory_check(
        task.compiled,
        predicted_argument_bytes=sum(sizes),
        predicted_peak_bytes=sum(stage_memory.values()) + batch,
        judge_peak=judge_peak,
    )


def _bytes_per_device(shape: jax.ShapeDtypeStruct) -> float:
    held = shape.shape if shape.sharding is None else shape.sharding.shard_shape(shape.shape)
    return float(math.prod(held) * shape.dtype.itemsize)


def _beside(measured: float, predicted: float | None) -> str:
    if predicted is None:
        return format_bytes(measured)
    return f"{format_bytes(measured)} (predicted {format_bytes(predicted)})"
