"""The actor around a `MeshWorker`: what happens before JAX is touched, and plain calls after."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from mesh_runtime.data_plane import Address, DataPlane
from mesh_runtime.worker import MeshWorker, WorkerMesh, WorkerProgram, worker_name


class ActorWorker:
    """One host of one mesh in a Ray actor. The JAX client is made in `join`, not before."""

    def __init__(self, mesh: int, host: int, token: bytes) -> None:
        self._mesh, self._host, self._token = mesh, host, token
        self._worker: MeshWorker | None = None

    def process_id(self) -> int:
        """Return the number of this process."""
        return os.getpid()

    def free_address(self) -> str:
        """Return "host:port" of this node with a port nobody listens on."""
        with socket.create_server((_node_address(), 0)) as probe:
            host, port = probe.getsockname()[:2]
        return f"{host}:{port}"

    def join(self, meshes: Sequence[WorkerMesh], coordinator: str) -> Address:
        """Enter the mesh's group of processes and open the data plane; return where it listens."""
        import jax

        own = meshes[self._mesh]
        if own.num_hosts > 1:
            jax.distributed.initialize(
                coordinator_address=coordinator,
                num_processes=own.num_hosts,
                process_id=self._host,
            )
        name = worker_name(self._mesh, self._host)
        plane = DataPlane(name, self._token, _node_address())
        self._worker = MeshWorker(self._mesh, self._host, meshes, plane)
        return plane.address

    def connect(self, peers: Mapping[str, Address]) -> None:
        """Learn where all workers listen."""
        self._joined().connect(peers)

    def load(self, program: WorkerProgram) -> None:
        """Install a program."""
        self._joined().load(program)

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Make arrays resident."""
        self._joined().put(inputs)

    def step(self, number: int, batch: Mapping[str, Any]) -> Any:
        """Execute the program once."""
        return self._joined().step(number, batch)

    def fetch(self, names: Sequence[str]) -> Any:
        """Return this host's tiles of resident buffers."""
        return self._joined().fetch(names)

    def _joined(self) -> MeshWorker:
        if self._worker is None:
            raise RuntimeError("the worker has not joined its mesh; call join() first")
        return self._worker


def _node_address() -> str:
    """Return the address under which other nodes of the cluster reach this one."""
    import ray

    found: Any = ray.util
    return str(found.get_node_ip_address())
