"""Cross-mesh resharding: moving a sharded tensor from one mesh to another."""

from __future__ import annotations

import math

from attrs import field, frozen

from alpa_interchange.check import OneOf, non_negative, positive
from alpa_interchange.tensor import ShardingSpec, TensorType

TRANSFER_METHODS = ("local", "copy", "broadcast", "gather", "reduce")


@frozen(kw_only=True)
class PlacedTensor:
    """A tensor laid out on devices: `mesh_shape` and `axis_names` give the logical mesh.

    `devices[k]` is the k-th device of the mesh in row-major order, `hosts[k]` the host it sits on.
    """

    spec: ShardingSpec
    axis_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    devices: tuple[int, ...]
    hosts: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        if len(self.axis_names) != len(self.mesh_shape):
            raise ValueError(
                f"PlacedTensor needs one axis name per mesh axis, got {self.axis_names} for the "
                f"mesh shape {self.mesh_shape}"
            )
        if not len(self.devices) == len(self.hosts) == math.prod(self.mesh_shape):
            raise ValueError(
                f"PlacedTensor on a mesh of shape {self.mesh_shape} needs "
                f"{math.prod(self.mesh_shape)} devices and as many hosts, got {len(self.devices)} "
                f"devices and {len(self.hosts)} hosts"
            )
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"PlacedTensor.devices must be distinct, got {self.devices}")
        used = {axis for dim in self.spec.dims for axis in dim} | set(self.spec.partial)
        if not used <= set(self.axis_names):
            raise ValueError(
                f"PlacedTensor.spec uses the mesh axes {sorted(used - set(self.axis_names))}, but "
                f"the mesh has only {self.axis_names}"
            )


@frozen(kw_only=True)
class ReshardingTask:
    """Move `tensor` from the `source` layout to the `target` layout."""

    tensor: TensorType
    source: PlacedTensor
    target: PlacedTensor

    def __attrs_post_init__(self) -> None:
        for side, placed in (("source", self.source), ("target", self.target)):
            if len(placed.spec.dims) != len(self.tensor.shape):
                raise ValueError(
                    f"ReshardingTask.{side}.spec has {len(placed.spec.dims)} dims, but the tensor "
                    f"of shape {self.tensor.shape} has {len(self.tensor.shape)}"
                )


@frozen(kw_only=True)
class Transfer:
    """One operation of a plan: `sender` passes the slice `start..stop` (per dim) to `receivers`.

    method "copy" sends to the only receiver, "broadcast" runs a pipelined chain through the
    receivers in the given order in `num_chunks` pieces, "gather" is an all-gather among the
    receivers of pieces that earlier transfers (`after`, indices into the plan) delivered, "reduce"
    runs a chain backwards: each receiver adds its summand of an unreduced source, and the last one
    has the sum; "local" stays on the device. A transfer starts once all of `after` have finished;
    those that its sender's host sends to others need only have left.
    """

    method: str = field(validator=OneOf(*TRANSFER_METHODS))
    start: tuple[int, ...]
    stop: tuple[int, ...]
    sender: int
    receivers: tuple[int, ...]
    num_chunks: int = field(default=1, validator=positive)
    after: tuple[int, ...] = ()


@frozen(kw_only=True, cache_hash=True)
class ReshardingPlan:
    """Transfers in the order every participant issues them, with predicted time and its bound."""

    task: ReshardingTask
    transfers: tuple[Transfer, ...]
    strategy: str
    seconds: float = field(validator=non_negative)
    lower_bound: float = field(validator=non_negative)  # seconds; no plan is faster in the model
