"""Device meshes. A mesh has *axes* (named, sized); a tensor has *dims*."""

from __future__ import annotations

import functools
import math

from attrs import field, frozen

from alpa_interchange.check import non_empty, non_negative, positive


@frozen(kw_only=True)
class MeshAxis:
    """One axis of a logical mesh, with the link its collectives run over."""

    name: str = field(validator=non_empty)
    size: int = field(validator=positive)
    bandwidth: float = field(default=1e9, validator=positive)  # bytes/s per device, one direction
    latency: float = field(default=0.0, validator=non_negative)  # seconds per hop


@frozen(kw_only=True)
class LogicalMesh:
    """N named axes over `num_devices` devices in row-major order (last axis varies fastest)."""

    axes: tuple[MeshAxis, ...] = field()

    @axes.validator
    def _distinct(self, _: object, axes: tuple[MeshAxis, ...]) -> None:
        names = [axis.name for axis in axes]
        if len(set(names)) != len(names):
            raise ValueError(f"LogicalMesh.axes must have distinct names, got {names}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def size(self, axes: tuple[str, ...]) -> int:
        """Return the number of devices along `axes` together."""
        total = 1
        for name in axes:
            total *= self._size_by_name[name]
        return total

    @functools.cached_property
    def _size_by_name(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.axes}


@frozen(kw_only=True)
class SubmeshSpec:
    """A rectangle of devices: `num_hosts` hosts of one group times `devices_per_host` devices."""

    num_hosts: int = field(validator=positive)
    devices_per_host: int = field(validator=positive)
    host_group: int = field(default=0, validator=non_negative)

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host


@frozen(kw_only=True)
class DeviceMesh:
    """A submesh placed in a cluster: global device numbers, in the order of its logical mesh."""

    submesh: SubmeshSpec
    logical: LogicalMesh
    device_ids: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        if len(self.device_ids) != self.logical.num_devices:
            raise ValueError(
                f"DeviceMesh.device_ids has {len(self.device_ids)} devices, but the logical mesh "
                f"{self.logical.shape} needs {self.logical.num_devices}"
            )
