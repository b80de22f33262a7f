"""Memory of one device by named terms, and how many microbatches each schedule keeps alive.

In flight at stage i of n with m microbatches                          -> in_flight()

    gpipe, sequential stages    m                    all forwards before the first backward
    1f1b                        min(m, n - i)
    eager-1f1b                  min(m, 2 (n - i) - 1)
    interleaved-1f1b, v chunks  min(m v, (n - i - 1) 2 + (v - 1) n + 1) / v   in stage activations
    token slices                as the schedule, in microbatches; slices of one live together
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import fields, frozen

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "sequential")


@frozen(kw_only=True)
class MemoryBreakdown:
    """Bytes of one device at the peak of a step, by name."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0  # kept for the backward passes of all microbatches in flight
    recomputation: float = 0.0  # activations rebuilt of the layer that runs backward
    temporaries: float = 0.0  # largest workspace and unsaved values of one kernel or layer
    communication: float = 0.0  # gathered parameters, reduction buckets, send and receive buffers
    fragmentation: float = 0.0  # allocator reserve
    runtime: float = 0.0  # driver, libraries and communicators

    @property
    def total(self) -> float:
        """Return the sum of all terms."""
        return sum(value for _, value in self.terms())

    @property
    def state(self) -> float:
        """Return what is held for the whole step: parameters, gradients and optimiser."""
        return self.parameters + self.gradients + self.optimizer

    def terms(self) -> Iterator[tuple[str, float]]:
        """Yield (name, bytes) of every term, in the order of the class."""
        for attribute in fields(type(self)):
            yield attribute.name, getattr(self, attribute.name)


def in_flight(
    schedule: str, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> float:
    """Return how many microbatches of stage activations `stage` keeps at its peak.

    With `interleaved-1f1b` a mesh runs `num_chunks` pieces of its layers; the result is in units of
    the activations of all of them for one microbatch, so it may be a fraction.
    """
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage must be in 0..{num_stages - 1}, got {stage}")
    if schedule == "gpipe":
        return num_microbatches
    if schedule == "sequential":
        return 1
    if schedule == "1f1b":
        return min(num_microbatches, num_stages - stage)
    if schedule == "eager-1f1b":
        return min(num_microbatches, 2 * (num_stages - stage) - 1)
    if schedule == "interleaved-1f1b":
        warm_up = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages + 1
        return min(num_microbatches * num_chunks, warm_up) / num_chunks
    raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")


def breakdown(
    *,
    parameter_bytes: float,
    gradient_bytes: float,
    optimizer_bytes: float,
    activation_bytes: float,
    schedule: str = "1f1b",
    stage: int = 0,
    num_stages: int = 1,
    num_microbatches: int = 1,
    num_chunks: int = 1,
    recomputation_bytes: float = 0.0,
    temporary_bytes: float = 0.0,
    communication_bytes: float = 0.0,
    fragmentation_bytes: float = 0.0,
    runtime_bytes: float = 0.0,
) -> MemoryBreakdown:
    """Return the memory of a device of `stage`; all bytes are per device and already sharded.

    `activation_bytes` is what one microbatch leaves for its backward pass on all chunks of the
    device.
    """
    alive = in_flight(schedule, stage, num_stages, num_microbatches, num_chunks) * activation_bytes
    return MemoryBreakdown(
        parameters=parameter_bytes,
        gradients=gradient_bytes,
        optimizer=optimizer_bytes,
        activations=alive,
        recomputation=recomputation_bytes,
        temporaries=temporary_bytes,
        communication=communication_bytes,
        fragmentation=fragmentation_bytes,
        runtime=runtime_bytes,
    )
