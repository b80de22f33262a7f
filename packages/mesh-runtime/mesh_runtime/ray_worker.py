"""The actor around a `MeshWorker`: what happens before JAX is touched, and plain calls after."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import ray
from attrs import evolve

from mesh_runtime.gpu_plane import GpuTransportMaker
from mesh_runtime.handshake import identity
from mesh_runtime.heartbeats import Progress
from mesh_runtime.object_store_link import Bytes, ObjectStoreLink
from mesh_runtime.program_cache import keep_programs
from mesh_runtime.ray_options import RayOptions
from mesh_runtime.transfers import Transport, TransportMaker
from mesh_runtime.worker import MeshWorker
from mesh_runtime.worker_mesh import WorkerMesh, worker_name

_ray: Any = ray
_GPUS = "CUDA_VISIBLE_DEVICES"
_OUTCOMES = 16
"""Calls whose outcome is kept: more than threads of the driver call a worker at a time, which are a
step and the saving of a checkpoint."""


class ActorWorker:
    """One host of one mesh in a Ray actor. Which it is it learns in `introduce`; the JAX client is
    made in `join`, not before."""

    def __init__(
        self,
        transport: TransportMaker | None,
        gpu_transport: GpuTransportMaker | None,
        options: RayOptions,
    ) -> None:
        self._mesh, self._host, self._address = 0, 0, ""
        self._worker: MeshWorker | None = None
        self._link: ObjectStoreLink | None = None
        self._transport: Transport | None = None
        self._make_transport, self._gpu_transport = transport, gpu_transport
        self._options = options
        self._working = threading.Lock()
        self._busy = False
        self._outcomes: dict[int, tuple[Any, Exception | None]] = {}  # of the last calls of `work`
        self._forgotten = 0  # calls up to this number were done before

    def ready(self) -> None:
        """Import what a worker needs that was not needed to make it."""
        with suppress(ModuleNotFoundError):
            import_module("tensorstore")  # of checkpoints

    def process_id(self) -> int:
        """Return the number of this process."""
        return os.getpid()

    def node_address(self) -> str:
        """Return the address under which other nodes of the cluster reach this one."""
        return str(_ray.util.get_node_ip_address())

    def progress(self) -> Progress:
        """Return what the worker is doing, also while it does it."""
        idle = Progress(mesh=self._mesh, host=self._host)
        found = idle if self._worker is None else self._worker.doing.progress()
        return evolve(found, busy=self._busy)

    def introduce(
        self, mesh: int, host: int, token: bytes, gpus: str | None, address: str
    ) -> tuple[dict[str, str], str, str | None]:
        """Become a host of a mesh, with `gpus` if another had them before, that the others reach
        at an address. Return the versions here, the address with a port that nobody listens on,
        and which GPUs are ours."""
        if not self._address:  # Ray calls again where it lost the answer
            self._mesh, self._host = mesh, host
            if gpus is not None:
                os.environ[_GPUS] = gpus  # CUDA reads it when the JAX client is made
            keep_programs()
            name = worker_name(mesh, host)
            if self._options.data_plane == "object-store":
                self._link = ObjectStoreLink(name, _ray.get)
            if self._make_transport is not None:
                checksum = self._options.checksum
                self._transport = self._make_transport(
                    name, token, address, link=self._link, checksum=checksum
                )
            with socket.create_server((address, 0)) as probe:
                self._address = ":".join(map(str, probe.getsockname()[:2]))
        return identity(), self._address, os.environ.get(_GPUS)

    def join(self, meshes: Sequence[WorkerMesh], coordinator: str) -> Any:
        """Enter the mesh's group of processes; return where the transport is found, if it is."""
        import jax

        if self._worker is not None:  # Ray calls again where it lost the answer
            return None if self._transport is None else self._transport.address
        own = meshes[self._mesh]
        if own.num_hosts > 1:
            jax.distributed.initialize(
                coordinator_address=coordinator,
                num_processes=own.num_hosts,
                process_id=self._host,
            )
        self._worker = MeshWorker(
            self._mesh, self._host, meshes, self._transport, gpu_transport=self._gpu_transport
        )
        return None if self._transport is None else self._transport.address

    def connect(self, peers: Mapping[str, Any], owner_of: Mapping[int, str]) -> None:
        """Learn where all workers are found, or their actors, and who owns which device."""
        if self._transport is not None:
            self._transport.connect(peers, owner_of)

    def deliver(self, sender: str, number: int, header: dict[str, Any], payload: Bytes) -> None:
        """Take in a message of the object store, also while a step runs."""
        assert self._link is not None
        self._link.deliver(sender, number, header, payload)

    def saved(self, folder: str) -> Any:
        """Return what `MeshWorker.saved` says, also while a step runs."""
        assert self._worker is not None
        return self._worker.saved(folder)

    def work(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a method of the worker, once for each number: where a call or its answer was lost it
        comes again, and is given what came of the first; one that comes much later does nothing.
        Numbers of several threads of the driver come in any order."""
        with self._working:
            if method == "fetch":  # changes nothing, and what it gives may be large
                result, error = self._done(method, *arguments)
            else:
                if number not in self._outcomes and number > self._forgotten:
                    self._busy = True
                    self._outcomes[number] = self._done(method, *arguments)
                    self._busy = False
                result, error = self._outcomes.get(number, (None, None))
                while len(self._outcomes) > _OUTCOMES:
                    oldest = min(self._outcomes)
                    del self._outcomes[oldest]
                    self._forgotten = oldest
        if error is not None:
            raise error
        return result

    def _done(self, method: str, *arguments: Any) -> tuple[Any, Exception | None]:
        """Return what came of a call, or its error."""
        try:
            if self._worker is None:
                raise RuntimeError("the worker has not joined its mesh; call join() first")
            return getattr(self._worker, method)(*arguments), None
        except Exception as error:
            return None, error
