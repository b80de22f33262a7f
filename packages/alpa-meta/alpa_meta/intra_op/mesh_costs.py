"""What compute and communication cost on one logical mesh, in seconds, and what of it is
remembered."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from alpa_interchange import LogicalMesh, MeshAxis, ShardingRule, ShardingSpec, Strategy
from cost_model import CostModel
from ilp_sharding.spec_conversion import Conversions, sharding_specs
from ilp_sharding.strategies import natural_strategies


@frozen(eq=False)
class Columns:
    """The specs of each operand and result under every strategy of an operator."""

    operands: tuple[tuple[ShardingSpec, ...], ...]
    results: tuple[tuple[ShardingSpec, ...], ...]


@frozen(eq=False)
class Conversion:
    """What the conversion of a value takes, [sources, targets]; None where no pair takes any."""

    seconds: np.ndarray | None
    copied: np.ndarray | None  # bytes per device of the copy it makes


@frozen(eq=False)
class MeshCosts:
    """A logical mesh and what compute and communication cost on it."""

    mesh: LogicalMesh
    model: CostModel
    host_group: int = 0
    while_trips: int = 8  # assumed trips of a while loop, whose true number is not known
    followed: dict[Hashable, tuple[Strategy, ...]] = field(factory=dict, repr=False)
    completed: dict[Hashable, tuple[tuple[ShardingSpec, ...], np.ndarray]] = field(
        factory=dict, repr=False
    )
    _strategies: dict[int, tuple[Strategy, ...]] = field(factory=dict, repr=False)
    _matrices: dict[Hashable, np.ndarray] = field(factory=dict, repr=False)
    _specs: dict[tuple[int, ...], tuple[ShardingSpec, ...]] = field(factory=dict, repr=False)
    _summed_specs: dict[tuple[int, ...], tuple[ShardingSpec, ...]] = field(factory=dict, repr=False)
    _conversions: dict[Hashable, Conversion] = field(factory=dict, repr=False)
    _names: dict[int, tuple[Any, list[str]]] = field(factory=dict, repr=False)
    _columns: dict[int, tuple[Any, Columns]] = field(factory=dict, repr=False)
    _only: dict[Strategy, tuple[Strategy, ...]] = field(factory=dict, repr=False)
    _numbers: dict[int, tuple[Any, int]] = field(factory=dict, repr=False)
    _of_value: dict[Any, int] = field(factory=dict, repr=False)

    @functools.cached_property
    def conversions(self) -> Conversions:
        """Return the conversions between specs on this mesh."""
        return Conversions(self.mesh, self.collective_seconds)

    def collective_seconds(
        self, kind: str, bytes: float, axes: tuple[str, ...], in_buckets: bool = False
    ) -> float:
        """Return the seconds of a collective along mesh axes, alone or as its share of a bucket."""
        if in_buckets:
            return self.bucket_share_seconds(kind, bytes, axes)
        return float(self.model.collective_seconds(kind, bytes, self._axes(axes)))

    @functools.cached_property
    def bucketed(self) -> Conversions:
        """Return the conversions of values that travel in buckets, at their share of a bucket."""
        return Conversions(self.mesh, self.bucket_share_seconds)

    def bucket_share_seconds(self, kind: str, bytes: float, axes: tuple[str, ...]) -> float:
        """Return the seconds a tensor adds to a bucket of collectives along mesh axes."""
        return self.model.bucket_share_seconds(kind, bytes, self._axes(axes), self.host_group)

    def bucketed_seconds(self, kind: str, bytes: Sequence[float], axes: tuple[str, ...]) -> float:
        """Return the seconds of collectives along mesh axes that are sent in buckets."""
        return self.model.bucketed_seconds(kind, bytes, self._axes(axes), self.host_group)

    def _axes(self, names: tuple[str, ...]) -> tuple[MeshAxis, ...]:
        return tuple(axis for axis in self.mesh.axes if axis.name in names)

    def specs(self, shape: tuple[int, ...]) -> tuple[ShardingSpec, ...]:
        """Return the sharding specs of tensors of `shape`, remembered."""
        if shape not in self._specs:
            self._specs[shape] = sharding_specs(shape, self.mesh)
        return self._specs[shape]

    def summed_specs(self, shape: tuple[int, ...]) -> tuple[ShardingSpec, ...]:
        """Return the sharding specs of tensors of `shape`, also of unreduced sums, remembered."""
        if shape not in self._summed_specs:
            names = [axis.name for axis in self.mesh.axes if axis.size > 1]
            self._summed_specs[shape] = tuple(
                ShardingSpec(spec.dims, left)
                for spec in self.specs(shape)
                for count in range(len(names) + 1)
                for left in itertools.combinations(names, count)
                if not any(axis in dim for dim in spec.dims for axis in left)
            )
        return self._summed_specs[shape]

    def names(self, choices: Sequence[Any]) -> list[str]:
        """Return specs or strategies as text, remembered for as long as they are the same
        objects."""
        known = self._names.get(id(choices))
        if known is None:
            known = (choices, [str(choice) for choice in choices])
            self._names[id(choices)] = known
        return known[1]

    def only(self, strategy: Strategy) -> tuple[Strategy, ...]:
        """Return the strategy as the only one, the same object for equal strategies."""
        if strategy not in self._only:
            self._only[strategy] = (strategy,)
        return self._only[strategy]

    def columns(self, strategies: tuple[Strategy, ...]) -> Columns:
        """Return the specs of an operator's operands and results, remembered likewise."""
        known = self._columns.get(id(strategies))
        if known is None:
            made = Columns(
                tuple(zip(*(one.operands for one in strategies), strict=True)),
                tuple(zip(*(one.results for one in strategies), strict=True)),
            )
            known = (strategies, made)
            self._columns[id(strategies)] = known
        return known[1]

    def number(self, value: Hashable) -> int:
        """Return a number that is equal for equal values; objects seen before are not compared.

        Hashing a tuple of fifty specs takes longer than all else that is done with it.
        """
        known = self._numbers.get(id(value))
        if known is None:
            known = (value, self._of_value.setdefault(value, len(self._of_value)))
            self._numbers[id(value)] = known
        return known[1]

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
        key = (shape, bytes, self.number(sources), self.number(targets), in_buckets, alike)
        known = self._conversions.get(key)
        if known is None:
            seconds = self.conversion_seconds(shape, bytes, sources, targets, in_buckets)
            alone = self.conversion_seconds(shape, bytes, sources, targets)
            sends = alone > 1e-12 + 1e-17 * bytes
            sizes = [self.mesh.size(tuple(a for dim in s.dims for a in dim)) for s in targets]
            copied = sends * (bytes / np.array(sizes))
            known = Conversion(*(_unless_zero(one, alike) for one in (seconds, copied)))
            self._conversions[key] = known
        return known

    def strategies(self, rule: ShardingRule) -> tuple[Strategy, ...]:
        """Return all strategies of a rule on the mesh with sums left partial, remembered."""
        key = self.number(rule)
        if key not in self._strategies:
            self._strategies[key] = natural_strategies(rule, self.mesh)
        return self._strategies[key]

    def conversion_seconds(
        self,
        shape: tuple[int, ...],
        bytes: float,
        sources: tuple[ShardingSpec, ...],
        targets: tuple[ShardingSpec, ...],
        in_buckets: bool = False,
    ) -> np.ndarray:
        """Return [sources, targets] seconds of conversion, alone or in buckets, remembered."""
        key = (shape, bytes, self.number(sources), self.number(targets), in_buckets)
        if key not in self._matrices:
            rows = {spec: number for number, spec in enumerate(dict.fromkeys(sources))}
            columns = {spec: number for number, spec in enumerate(dict.fromkeys(targets))}
            conversions = self.bucketed if in_buckets else self.conversions
            small = conversions.matrix(shape, bytes, list(rows), list(columns))
            self._matrices[key] = small[
                np.ix_([rows[spec] for spec in sources], [columns[spec] for spec in targets])
            ]
        return self._matrices[key]

    @property
    def platform(self) -> str:
        """The kind of the devices: "gpu", "tpu" or "cpu" (XLA host devices)."""
        return self.model.device(self.host_group).platform

    def compute_seconds(self, kind: str, flops: float, bytes: float, dtype: str) -> float:
        """Return the seconds of an operator's part on one device.

        Elementwise work is taken as fused into its neighbours: memory traffic without a launch.
        """
        if kind == "elementwise":
            return bytes / self.model.device(self.host_group).memory_bandwidth
        return float(
            self.model.compute_seconds(flops, bytes, dtype, kind, host_group=self.host_group)
        )


def _unless_zero(matrix: np.ndarray, alike: bool) -> np.ndarray | None:
    reached = np.diagonal(matrix) if alike else matrix
    return matrix if reached.any() else None
