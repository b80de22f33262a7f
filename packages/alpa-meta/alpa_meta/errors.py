"""Errors a caller may want to catch."""

from __future__ import annotations

from alpa_meta.types import PyTree


class PlanError(ValueError):
    """A program, cluster, option or saved plan does not fit; the message says what and what to
    do."""


class OtherProgramError(PlanError):
    """A plan was made for another program."""


class InfeasibleError(PlanError):
    """No plan fits the memory; `missing_bytes` is how much each device lacks at least, and
    `mesh_shape` and `num_microbatches` the mesh of all devices and the cut of the batch that came
    closest, if one was tried."""

    def __init__(
        self,
        message: str,
        missing_bytes: float,
        mesh_shape: tuple[int, ...] | None = None,
        num_microbatches: int = 1,
    ) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.mesh_shape = mesh_shape
        self.num_microbatches = num_microbatches


class NonFiniteError(ArithmeticError):
    """A microbatch gave NaN or infinity (`Options(on_nan="raise")`), and nothing was updated.

    `result` is what the step would have returned, with its state as it was before. `step` counts
    the calls from 1.
    """

    def __init__(self, step: int, microbatch: int, task: str, result: PyTree = None) -> None:
        self.found = (
            f"step {step}: microbatch {microbatch} gave NaN or infinity (found in task {task!r})"
        )
        super().__init__(
            f"{self.found}; nothing was updated, and the state is that of the error's result"
        )
        self.step, self.microbatch, self.task, self.result = step, microbatch, task, result


class WorkersReplaced(RuntimeWarning):
    """Workers failed; others took their place, restored the state and did the steps since again."""


class NonFiniteWarning(RuntimeWarning):
    """A microbatch gave NaN or infinity, and its step was skipped (`Options(on_nan="skip")`)."""
