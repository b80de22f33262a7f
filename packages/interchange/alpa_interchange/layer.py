"""The layers of a program."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Layer:
    """A cluster of operators: its work per microbatch, and the class it shares with equal
    layers."""

    index: int
    equivalence_class: int
    forward_flops: float
    backward_flops: float
    parameter_bytes: float  # bytes of state first used in this layer
    boundary_bytes: float  # bytes that cross from this layer to the next, forward
    name: str = ""
    recomputation: str = "none"  # what its backward pass computes again: none, selective or full
