"""The program, framework-neutral: values, operators, layers."""

from __future__ import annotations

from attrs import field, frozen

from alpa_interchange.check import OneOf, non_negative
from alpa_interchange.rule import ShardingRule
from alpa_interchange.tensor import TensorType

VALUE_ROLES = ("state", "batch", "constant", "intermediate")
PHASES = ("forward", "backward", "update")


@frozen(kw_only=True)
class Value:
    """One tensor of the program. `name` is the user's path for inputs, else empty."""

    type: TensorType
    role: str = field(default="intermediate", validator=OneOf(*VALUE_ROLES))
    name: str = ""


@frozen(kw_only=True)
class Op:
    """One operator: value numbers in and out, its sharding rule, and its work on one device.

    `flops` counts multiply-adds as two; `bytes` is memory traffic without fusion. Work of a loop
    body is already multiplied by `trips`. `source` is the user's file and line.
    """

    name: str
    operands: tuple[int, ...]  # value numbers; literals are left out
    results: tuple[int, ...]
    rule: ShardingRule | None  # None: runs replicated
    flops: float = field(default=0.0, validator=non_negative)
    bytes: float = field(default=0.0, validator=non_negative)
    trips: int = 1
    phase: str = field(default="forward", validator=OneOf(*PHASES))
    source: str = ""


@frozen(kw_only=True)
class OpGraph:
    """Values and operators in program order; `aliases` pairs an input with the output replacing
    it."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...] = ()

    def __attrs_post_init__(self) -> None:
        defined = set(self.inputs)
        for op in self.ops:
            for value in op.operands:
                if value not in defined:
                    raise ValueError(
                        f"OpGraph: op {op.name!r} reads value {value} before it exists"
                    )
            defined.update(op.results)
        missing = set(self.outputs) - defined
        if missing:
            raise ValueError(f"OpGraph.outputs {sorted(missing)} are produced by no op")


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


@frozen(kw_only=True)
class LayerGraph:
    """The program as a chain of layers. `layer_of_op[k]` is the layer of `graph.ops[k]`."""

    layers: tuple[Layer, ...]
    layer_of_op: tuple[int, ...]
