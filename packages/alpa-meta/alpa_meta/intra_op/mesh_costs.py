"""What compute and communication cost on one logical mesh, in seconds, and what of it is
remembered."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen

from alpa_interchange import LogicalMesh, MeshAxis, ShardingSpec, Strategy
from alpa_meta.intra_op.layouts import Columns, Layouts, layouts_of
from alpa_meta.types import Floats, Ints
from cost_model import CostModel
from ilp_sharding.strategies import Conversions, ConversionTable, nominal_bytes

if TYPE_CHECKING:
    from alpa_meta.intra_op.sent_seconds import LinkParts


@frozen(eq=False)
class Completed:
    """The specs that sums are completed in, and [natural, completed] seconds, at each size."""

    finals: tuple[ShardingSpec, ...]
    seconds: tuple[Floats, ...]


@frozen(eq=False)
class Conversion:
    """What the conversion of a value takes, [sources, targets]; None where no pair takes any."""

    seconds: Floats | None
    copied: Floats | None  # bytes per device of the copy it makes


@frozen(eq=False)
class MeshCosts:
    """A logical mesh and what compute and communication cost on it."""

    mesh: LogicalMesh
    model: CostModel
    host_group: int = 0
    while_trips: int = 8  # assumed trips of a while loop, whose true number is not known
    completed: dict[Hashable, Completed] = field(factory=dict, repr=False)
    operators: dict[Hashable, Floats] = field(factory=dict, repr=False)
    _matrices: dict[Hashable, Floats] = field(factory=dict, repr=False)
    _scaled: dict[Hashable, Floats] = field(factory=dict, repr=False)
    _conversions: dict[Hashable, Conversion] = field(factory=dict, repr=False)
    _collectives: dict[Hashable, float] = field(factory=dict, repr=False)

    def forgotten(self) -> MeshCosts:
        """Return these costs with nothing remembered."""
        return MeshCosts(self.mesh, self.model, self.host_group, self.while_trips)

    @functools.cached_property
    def layouts(self) -> Layouts:
        """Return the specs and strategies on this mesh."""
        return layouts_of(self.mesh)

    @functools.cached_property
    def conversions(self) -> Conversions:
        """Return the conversions between specs on this mesh."""
        return Conversions(self.layouts.mesh, self.collective_seconds)

    def collective_seconds(
        self, kind: str, bytes: float, axes: tuple[str, ...], in_buckets: bool = False
    ) -> float:
        """Return the seconds of a collective along mesh axes, alone or as its share of a bucket,
        remembered."""
        key = (kind, bytes, axes, in_buckets)
        known = self._collectives.get(key)
        if known is None:
            if in_buckets:
                known = self.bucket_share_seconds(kind, bytes, axes)
            else:
                known = float(self.model.collective_seconds(kind, bytes, self._axes(axes)))
            self._collectives[key] = known
        return known

    @functools.cached_property
    def links(self) -> LinkParts:
        """Return what splits seconds into those of the axes' links."""
        from alpa_meta.intra_op.sent_seconds import LinkParts  # which is made of these costs

        return LinkParts(self)

    @functools.cached_property
    def bucketed(self) -> Conversions:
        """Return the conversions of values that travel in buckets, at their share of a bucket."""
        return Conversions(self.layouts.mesh, self.bucket_share_seconds)

    def bucket_share_seconds(self, kind: str, bytes: float, axes: tuple[str, ...]) -> float:
        """Return the seconds a tensor adds to a bucket of collectives along mesh axes."""
        return self.model.bucket_share_seconds(kind, bytes, self._axes(axes), self.host_group)

    def bucketed_seconds(
        self, kind: str, bytes: Sequence[float] | Mapping[float, int], axes: tuple[str, ...]
    ) -> float:
        """Return the seconds of collectives along mesh axes that are sent in buckets, as many of
        each number of bytes as there are."""
        return self.model.bucketed_seconds(kind, bytes, self._axes(axes), self.host_group)

    def host_seconds(self, bytes: float, specs: Sequence[ShardingSpec]) -> Floats:
        """Return [specs] seconds of bringing a value from the memory of the host and back, one
        after the other."""
        group = self.model.cluster.host_groups[self.host_group]
        link = group.host_link
        if link is None:  # host devices, whose memory it is
            bandwidth, latency = group.device.memory_bandwidth, 0.0
        else:
            bandwidth, latency = link.effective_bandwidth, link.latency
        shares = [self.mesh.size(tuple(a for dim in spec.dims for a in dim)) for spec in specs]
        return 2.0 * (latency + bytes / bandwidth / np.array(shares, dtype=float))

    def _axes(self, names: tuple[str, ...]) -> tuple[MeshAxis, ...]:
        return tuple(axis for axis in self.mesh.axes if axis.name in names)

    def only(self, strategy: Strategy) -> tuple[Strategy, ...]:
        """Return the strategy as the only one."""
        return self.layouts.same_tuple((strategy,))

    def columns(self, strategies: tuple[Strategy, ...]) -> Columns:
        """Return the specs of an operator's operands and results under its strategies."""
        return self.layouts.columns(self.number(strategies))

    def parts(self, specs: tuple[ShardingSpec, ...]) -> Ints:
        """Return [specs] over how many devices each shards a tensor."""
        return self.layouts.parts(self.number(specs))

    def number(self, value: Hashable) -> int:
        """Return the number of a value (`Layouts`)."""
        return self.layouts.number(value)

    def conversion(
        self,
        shape: tuple[int, ...],
        bytes: float,
        sources: tuple[ShardingSpec, ...],
        targets: tuple[ShardingSpec, ...],
        in_buckets: bool,
        alike: bool,
    ) -> Conversion:
        """Return what a conversion takes, remembered; `alike`: source and target have one number.

        A part of what is there already takes no memory.
        """
        there = self.number(targets)
        key = (shape, bytes, self.number(sources), there, in_buckets, alike)
        known = self._conversions.get(key)
        if known is None:
            seconds = self.conversion_seconds(shape, bytes, sources, targets, in_buckets)
            alone = self.conversion_seconds(shape, bytes, sources, targets)
            sends = alone > 1e-12 + 1e-17 * bytes
            copied = sends * (bytes / self.layouts.parts(there))
            known = Conversion(*(_unless_zero(one, alike) for one in (seconds, copied)))
            self._conversions[key] = known
        return known

    def conversion_seconds(
        self,
        shape: tuple[int, ...],
        bytes: float,
        sources: tuple[ShardingSpec, ...],
        targets: tuple[ShardingSpec, ...],
        in_buckets: bool = False,
    ) -> Floats:
        """Return [sources, targets] seconds of conversion, alone or in buckets, remembered."""
        pattern = self.layouts.pattern(shape)
        key = (pattern, bytes, self.number(sources), self.number(targets), in_buckets)
        known = self._scaled.get(key)
        if known is None:
            nominal = nominal_bytes(bytes)
            base = (pattern, nominal, *key[2:])
            if base not in self._matrices:
                conversions = self.bucketed if in_buckets else self.conversions
                table = conversions.table(shape, nominal)
                self._matrices[base] = table.at(
                    self._places(pattern, sources, table), self._places(pattern, targets, table)
                )
            known = self._matrices[base] * self._scale(bytes, nominal)
            self._scaled[key] = known
        return known

    def _scale(self, bytes: float, nominal: float) -> float:
        """Return what to scale the seconds of a conversion of `nominal` bytes by."""
        return bytes / nominal if bytes else 0.0

    def _places(
        self, pattern: tuple[int, ...], specs: tuple[ShardingSpec, ...], table: ConversionTable
    ) -> Ints:
        """Return the numbers of specs in the tables of all tensors of one pattern, remembered."""
        return self.layouts.once(
            ("places", pattern, self.number(specs)), lambda: table.places(specs)
        )

    @property
    def platform(self) -> str:
        """The kind of the devices: "gpu", "tpu" or "cpu" (XLA host devices)."""
        return self.model.device(self.host_group).platform

    @property
    def attends(self) -> bool:
        """Whether the program that runs the step has attention as one kernel (`Program`)."""
        return self.model.program is not None and self.model.program.attends

    def compute_seconds(self, kind: str, flops: float, bytes: float, dtype: str) -> float:
        """Return the seconds of an operator's part on one device, its neighbours not known.

        Elementwise work is taken as fused into them: memory traffic without a launch.
        """
        if kind == "elementwise":
            return bytes / self.model.device(self.host_group).memory_bandwidth
        return self.kernel_seconds(kind, flops, bytes, dtype)

    def kernel_seconds(
        self,
        kind: str,
        flops: float,
        bytes: float,
        dtype: str,
        shape: tuple[int, ...] | None = None,
    ) -> float:
        """Return the seconds of the kernel that an operator is on one device: none of one that
        moves nothing, being computed inside its readers. On host devices nothing is launched."""
        if kind == "elementwise" and (not bytes or self.platform == "cpu"):
            return bytes / self.model.device(self.host_group).memory_bandwidth
        return float(self.model.compute_seconds(flops, bytes, dtype, kind, shape, self.host_group))


def _unless_zero(matrix: Floats, alike: bool) -> Floats | None:
    reached = np.diagonal(matrix) if alike else matrix
    return matrix if reached.any() else None
