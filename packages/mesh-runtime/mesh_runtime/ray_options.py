"""How workers are started on a Ray cluster, and how long they may take."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from alpa_interchange.check import non_negative, positive
from mesh_runtime.ray_connection import check_address
from mesh_runtime.ray_placement import PLACEMENTS

DATA_PLANES = ("auto", "sockets", "object-store")


@frozen(kw_only=True)
class RayOptions:
    """How workers are started and how long they may take.

    `address` is that of the cluster; None: the one this process is connected to or RAY_ADDRESS
    names, else a new local one. `platform` is that of JAX in the workers; None: "cuda" where a mesh
    has GPUs, else "cpu". `placement` says how hosts are spread over nodes, in Ray's words. Workers
    compile with this process's XLA_FLAGS and have 64-bit types if it does, unless `environment`
    says otherwise.

    With `stand_by`, steps that survive failures have a process in reserve for each of their own: it
    takes 0.25 GB of memory, and saves starting Python and importing jax when a worker fails.

    Values go from mesh to mesh between GPUs where all workers can (`data_plane="auto"`), else
    through the memory of hosts: over "sockets", or Ray's "object-store", which is slower but needs
    no connections between nodes. With `checksum` they carry a CRC32 and go through hosts.
    """

    address: str | None = None
    platform: str | None = None
    placement: str = "SPREAD"
    cpus_per_actor: float = field(default=1.0, validator=non_negative)  # of meshes made of a plan
    environment: Mapping[str, str] = field(factory=dict, hash=False)  # variables for the workers
    start_timeout: float = field(default=300.0, validator=positive)  # seconds
    step_timeout: float = field(default=600.0, validator=positive)  # seconds, also for load
    replace_timeout: float = field(default=60.0, validator=positive)  # seconds, for room after loss
    heartbeat_seconds: float = field(default=1.0, validator=positive)  # between questions
    heartbeat_timeout: float = field(default=8.0, validator=positive)  # without an answer
    stand_by: bool = True
    data_plane: str = "auto"
    checksum: bool = False

    def __attrs_post_init__(self) -> None:
        check_address(self.address)
        for name, value, known in (
            ("data_plane", self.data_plane, DATA_PLANES),
            ("placement", self.placement, PLACEMENTS),
        ):
            if value not in known:
                raise ValueError(f"RayOptions.{name} must be one of {known}, got {value!r}")
