"""The actor around a `MeshWorker`: what happens before JAX is touched, and plain calls after."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from mesh_runtime.data_plane import Bytes, DataPlane
from mesh_runtime.handshake import identity
from mesh_runtime.heartbeats import Progress
from mesh_runtime.object_store_plane import ObjectStorePlane
from mesh_runtime.worker import MeshWorker, WorkerMesh, worker_name

_ray: Any = ray


class ActorWorker:
    """One host of one mesh in a Ray actor. The JAX client is made in `join`, not before."""

    def __init__(self, mesh: int, host: int, token: bytes, data_plane: str) -> None:
        self._mesh, self._host = mesh, host
        self._worker: MeshWorker | None = None
        name = worker_name(mesh, host)
        self._plane: DataPlane | ObjectStorePlane = (
            DataPlane(name, token, _node_address())
            if data_plane == "sockets"
            else ObjectStorePlane(name, _ray.get)
        )

    def process_id(self) -> int:
        """Return the number of this process."""
        return os.getpid()

    def progress(self) -> Progress:
        """Return what the worker is doing, also while it does it."""
        if self._worker is None:
            return Progress(mesh=self._mesh, host=self._host)
        return self._worker.doing.progress()

    def introduce(self) -> tuple[dict[str, str], str]:
        """Return the versions here, and "host:port" of this node with a port nobody listens on."""
        with socket.create_server((_node_address(), 0)) as probe:
            host, port = probe.getsockname()[:2]
        return identity(), f"{host}:{port}"

    def join(self, meshes: Sequence[WorkerMesh], coordinator: str) -> Any:
        """Enter the mesh's group of processes; return where the data plane listens, if it does."""
        import jax

        own = meshes[self._mesh]
        if own.num_hosts > 1:
            jax.distributed.initialize(
                coordinator_address=coordinator,
                num_processes=own.num_hosts,
                process_id=self._host,
            )
        self._worker = MeshWorker(self._mesh, self._host, meshes, self._plane)
        return self._plane.address if isinstance(self._plane, DataPlane) else None

    def connect(self, peers: Mapping[str, Any]) -> None:
        """Learn where all workers listen, or their actors."""
        self._plane.connect(peers)

    def deliver(self, sender: str, header: dict[str, Any], payload: Bytes) -> None:
        """Take in a message of the object-store plane, also while a step runs."""
        assert isinstance(self._plane, ObjectStorePlane)
        self._plane.deliver(sender, header, payload)

    def work(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        if self._worker is None:
            raise RuntimeError("the worker has not joined its mesh; call join() first")
        return getattr(self._worker, method)(*arguments)


def _node_address() -> str:
    """Return the address under which other nodes of the cluster reach this one."""
    return str(_ray.util.get_node_ip_address())
