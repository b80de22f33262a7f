"""A mesh as the workers of other meshes see it."""

from __future__ import annotations

import math

from attrs import frozen


@frozen(kw_only=True)
class WorkerMesh:
    """The grid of a mesh, and the processes its devices are spread over, evenly and in order."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    num_hosts: int

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def host_of(self, position: int) -> int:
        """Return the process that has the device at `position` of the grid."""
        return position * self.num_hosts // self.num_devices


def worker_name(mesh: int, host: int) -> str:
    """Return what errors and the transport call a worker."""
    return f"mesh {mesh} host {host}"
