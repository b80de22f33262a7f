"""What crosses from one layer of a window to the next, and how it lies on a mesh there."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from alpa_interchange import (
    BoundaryLayout,
    BoundaryValue,
    LogicalMesh,
    ShardingSpec,
    SubmeshSpec,
    TensorType,
)
from alpa_meta.compat import Literal, Var, dtype_of, is_drop, shape_of
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.inter_op.window import Window
from alpa_meta.intra_op.selection import Selection


@frozen(eq=False)
class Boundary:
    """The values that cross from one layer of a window to the next, forward and back."""

    values: tuple[Var, ...]
    kinds: tuple[tuple[bool, str, tuple[int, ...]], ...]  # forward?, dtype, shape

    def lies(
        self, selection: Selection, choice: Sequence[int], submesh: SubmeshSpec, samples: int
    ) -> BoundaryLayout:
        """Return how what the next layer is sent lies under a choice, with microbatches of
        `samples`."""

        def shares(spec: ShardingSpec) -> tuple[float, float]:
            return held_shares(spec, selection.costs.mesh, submesh.num_hosts)

        forward = [
            (var, BoundaryValue(tensor=TensorType(shape, dtype), spec=selection.spec(var, choice)))
            for var, (there, dtype, shape) in zip(self.values, self.kinds, strict=True)
            if there
        ]
        sent = [(tensor_bytes(var), shares(value.spec)) for var, value in forward]
        total = sum(size for size, _ in sent)
        if not total:
            return BoundaryLayout(bytes=0.0)
        on_host, on_device = (
            sum(size * shares[k] for size, shares in sent) / total for k in (0, 1)
        )
        return BoundaryLayout(
            bytes=total / samples,
            host_share=on_host,
            device_share=on_device,
            values=tuple(value for _, value in forward),
        )

    def layout(self, selection: Selection, choice: Sequence[int]) -> tuple[str, ...]:
        return tuple(str(selection.spec(var, choice)) for var in self.values)


@functools.lru_cache(maxsize=4096)
def held_shares(spec: ShardingSpec, mesh: LogicalMesh, num_hosts: int) -> tuple[float, float]:
    """Return the shares of a tensor that a host and a device hold at most."""
    cut = {name for axes in spec.dims for name in axes}
    tiles, tile = 1, np.zeros(mesh.num_devices, dtype=np.int64)
    for axis, index in zip(mesh.axes, np.indices(mesh.shape), strict=True):
        if axis.name in cut:
            tiles, tile = tiles * axis.size, tile * axis.size + index.ravel()
    on_host = max(len(set(held)) for held in tile.reshape(num_hosts, -1).tolist())
    return on_host / tiles, 1 / tiles


def boundaries(window: Window) -> dict[int, Boundary]:
    """Return, by layer of the window, what crosses from it and those before it to those behind."""
    staging = window.staging
    made: dict[Var, int] = {}
    backward: set[Var] = set()
    last: dict[Var, int] = {}
    for eqn, phase, layer in zip(staging.eqns, staging.phases, staging.layers, strict=True):
        if layer is None or phase == "update":
            continue
        for atom in eqn.invars:
            if isinstance(atom, Literal) or atom not in made:
                continue
            if (phase == "backward") == (atom in backward):
                end = min if phase == "backward" else max
                last[atom] = end(last.get(atom, layer), layer)
        for var in eqn.outvars:
            if not is_drop(var):
                made[var] = layer
                if phase == "backward":
                    backward.add(var)
    found = {}
    for layer in sorted({layer for layer in staging.layers if layer is not None}):
        crossing = [
            (var not in backward, str(dtype_of(var)), tuple(shape_of(var)), number, var)
            for number, (var, stop) in enumerate(last.items())
            if min(made[var], stop) <= layer < max(made[var], stop)
        ]
        crossing.sort(key=lambda one: one[:4])
        found[layer] = Boundary(
            tuple(one[4] for one in crossing), tuple(one[:3] for one in crossing)
        )
    return found
