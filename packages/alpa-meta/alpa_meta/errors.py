"""Errors a caller may want to catch."""

from __future__ import annotations


class PlanError(ValueError):
    """A program, cluster, option or saved plan does not fit; the message says what and what to
    do."""


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
