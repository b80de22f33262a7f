"""What compute and communication cost on one logical mesh, in seconds, and what of it is
remembered."""

from __future__ import annotations

import functools
from collections.abc import Hashable

import numpy as np
from attrs import field, frozen

from alpa_interchange import LogicalMesh, ShardingRule, ShardingSpec, Strategy
from cost_model import CostModel
from ilp_sharding.spec_conversion import Conversions
from ilp_sharding.strategies import natural_strategies


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
    _strategies: dict[ShardingRule, tuple[Strategy, ...]] = field(factory=dict, repr=False)
    _matrices: dict[Hashable, np.ndarray] = field(factory=dict, repr=False)

    @functools.cached_property
    def conversions(self) -> Conversions:
        """Return the conversions between specs on this mesh."""
        return Conversions(self.mesh, self.collective_seconds)

    def collective_seconds(self, kind: str, bytes: float, axes: tuple[str, ...]) -> float:
        """Return the seconds of a collective along mesh axes."""
        chosen = tuple(axis for axis in self.mesh.axes if axis.name in axes)
        return float(self.model.collective_seconds(kind, bytes, chosen))

    def strategies(self, rule: ShardingRule) -> tuple[Strategy, ...]:
        """Return all strategies of a rule on the mesh with sums left partial, remembered."""
        if rule not in self._strategies:
            self._strategies[rule] = natural_strategies(rule, self.mesh)
        return self._strategies[rule]

    def conversion_seconds(
        self,
        shape: tuple[int, ...],
        bytes: float,
        sources: tuple[ShardingSpec, ...],
        targets: tuple[ShardingSpec, ...],
    ) -> np.ndarray:
        """Return [sources, targets] seconds of conversion, remembered."""
        key = (shape, bytes, sources, targets)
        if key not in self._matrices:
            rows = {spec: number for number, spec in enumerate(dict.fromkeys(sources))}
            columns = {spec: number for number, spec in enumerate(dict.fromkeys(targets))}
            small = self.conversions.matrix(shape, bytes, list(rows), list(columns))
            self._matrices[key] = small[
                np.ix_([rows[spec] for spec in sources], [columns[spec] for spec in targets])
            ]
        return self._matrices[key]

    def compute_seconds(self, kind: str, flops: float, bytes: float, dtype: str) -> float:
        """Return the seconds of an operator's part on one device.

        Elementwise work is taken as fused into its neighbours: memory traffic without a launch.
        """
        if kind == "elementwise":
            return bytes / self.model.device(self.host_group).memory_bandwidth
        return float(
            self.model.compute_seconds(flops, bytes, dtype, kind, host_group=self.host_group)
        )
