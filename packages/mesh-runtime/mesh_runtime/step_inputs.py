"""What a step on workers reads: which host is sent which share of it, holds it, or reads it.

The work does not grow with the number of microbatches: a batch is given whole, each host is sent
one strided share of all its microbatches, and cuts it up itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from mesh_runtime.boundary import check_present, destinations
from mesh_runtime.driver_memory import MappedShare
from mesh_runtime.host_batches import HostLeaf, HostRead
from mesh_runtime.layout import HostTiles, host_tiles
from mesh_runtime.loaded_plan import LoadedPlan
from mesh_runtime.order import value_name
from mesh_runtime.pieces import Box
from mesh_runtime.ray_workers import RayWorkers, Worker
from mesh_runtime.remote_array import RemoteArray, StaleArrayError, fetched
from mesh_runtime.worker_types import ArrayType

Shares: TypeAlias = dict[tuple[int, int], dict[str, HostTiles]]
"""What each (mesh, host) is sent, by name."""

_INLINE = 100 * 1024
"""Bytes up to which Ray sends an argument with the call (its max_direct_call_object_size); larger
ones it puts into the object store, once for every call that has them."""


@frozen
class StepInputs:
    """What a step reads: `bound` are numbers of arrays that a mesh holds, `reads` what its hosts
    read of a batch, `shares` what each host is sent."""

    bound: list[dict[str, int]]
    shares: Shares
    reads: list[dict[str, HostRead]]

    def stored(self, workers: RayWorkers) -> StoredShares:
        """Copy large shares to where hosts find them, once: into memory that all workers map, or
        those that several are sent into the object store."""
        counts = Counter(one for shares in self.shares.values() for one in shares.values())
        large = {one: count for one, count in counts.items() if one.nbytes > _INLINE}
        memory = workers.memory
        if memory is not None:
            return StoredShares({}, {one: memory.share(one, n) for one, n in large.items()})
        return StoredShares({one: workers.ray.put(one) for one, n in large.items() if n > 1}, {})


@frozen
class StoredShares:
    """Shares that do not go along with calls: in the object store, or mapped by workers."""

    references: dict[HostTiles, Any]
    mapped: dict[HostTiles, MappedShare]


@frozen
class InputSorter:
    """Sorts what is given to the steps of a plan that workers have loaded."""

    workers: RayWorkers
    loaded: LoadedPlan

    def of_step(self, batch: Mapping[str, Any], resident: Mapping[str, RemoteArray]) -> StepInputs:
        """Return what a step reads of `batch` and of resident arrays."""
        order = self.loaded.order
        bound: list[dict[str, int]] = [{} for _ in order.inputs]
        reads: list[dict[str, HostRead]] = [{} for _ in order.inputs]
        moved: list[tuple[int, str]] = []
        values: dict[str, NDArray[Any]] = {}
        for mesh, name in destinations(order, batch, "step"):
            value = batch[name]
            if self._holds(mesh, value):
                bound[mesh][name] = value.buffer.number
                continue
            if isinstance(value, HostLeaf):
                reads[mesh][name] = self._read(name, value)
                continue
            moved.append((mesh, name))
            if name not in values:
                values[name] = self.value(name, value)
        for name, handle in resident.items():
            for mesh in self.loaded.readers(name):
                bound[mesh][name] = handle.buffer.number
        shares = self.shares(moved, values)
        for mesh, names in enumerate(order.values):
            there = {*bound[mesh], *shares[mesh, 0], *reads[mesh]}
            missing = [name for name in names if name not in there]
            apart = [part for name in missing for part in order.microbatches.get(name, (name,))]
            check_present(mesh, apart, there)
        return StepInputs(bound, shares, reads)

    def value(self, name: str, value: Any) -> NDArray[Any]:
        """Return an input on the host as the programs read it, one that is given whole with a first
        dim that counts microbatches; refuse another shape or dtype."""
        if isinstance(value, RemoteArray):
            value = fetched([RemoteArray(value.buffer)])[0]
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"{name!r} is a PRNG key array, which cannot cross processes; give "
                "jax.random.key_data of it to a program that wraps it again"
            )
        array = np.asarray(value)
        array = array.astype(self._checked_dtype(name, array), copy=False)
        count = self._count(name)
        return array.reshape(count, -1, *array.shape[1:]) if count else array

    def shares(
        self, placed: Iterable[tuple[int, str]], values: Mapping[str, NDArray[Any]]
    ) -> Shares:
        """Return, for each (mesh, host), its share of the values its mesh reads; where they are the
        same tiles, the same object."""
        shares: Shares = {(worker.mesh, worker.host): {} for worker in self.workers.workers}
        known: dict[tuple[str, tuple[Box, ...]], HostTiles] = {}
        for mesh, name in placed:
            layout = self.loaded.layouts[mesh][value_name(name)]
            num_hosts = self.workers.meshes[mesh].num_hosts
            for host, cut in enumerate(
                host_tiles(values[name], layout, num_hosts, self._count(name))
            ):
                boxes = tuple(box for box, _ in cut.tiles)
                shares[mesh, host][name] = known.setdefault((name, boxes), cut)
        return shares

    def type_of(self, name: str) -> ArrayType:
        """Return the type of an input, of a microbatch where it is given whole."""
        return self.loaded.type_of(self.loaded.readers(name)[0], name)

    def _count(self, name: str) -> int:
        """Return into how many microbatches an input is cut; 0 if it is none that is whole."""
        return len(self.loaded.order.microbatches.get(name, ()))

    def _holds(self, mesh: int, value: Any) -> bool:
        """Return whether a mesh has what a handle stands for; refuse one that is stale."""
        if not isinstance(value, RemoteArray):
            return False
        buffer = value.buffer
        if buffer.gone:
            raise StaleArrayError(f"{value!r}: {buffer.gone}")
        return buffer.owner is self.workers and buffer.value is None and mesh in buffer.meshes

    def _checked_dtype(self, name: str, value: Any) -> Any:
        """Return the dtype of an input as the programs read it; refuse another shape or dtype."""
        wanted, dtype = self.type_of(name), jax.dtypes.canonicalize_dtype(value.dtype)
        shape, count = wanted.shape, self._count(name)
        if count:
            shape = (count * shape[0], *shape[1:])
        if value.shape != shape or str(dtype) != wanted.dtype:
            raise ValueError(
                f"{name!r} must be {wanted.dtype}{list(shape)}, as the programs were exported for, "
                f"got {dtype}{list(value.shape)}; nothing was run, and the state is as it was"
            )
        return dtype

    def _read(self, name: str, value: HostLeaf) -> HostRead:
        """Return what hosts are told to read for an input."""
        self._checked_dtype(name, value)
        number, count = self.workers.number_of(value.source), self._count(name)
        return HostRead(number, value.step, value.leaf, value.rows, count)


def taken_along(
    worker: Worker, shares: Shares, stored: StoredShares
) -> tuple[dict[str, HostTiles | MappedShare], dict[str, Any]]:
    """Return what a worker is sent with its call, and references to what it takes from a store."""
    own, kept = shares[worker.mesh, worker.host], stored.references
    inline = {name: stored.mapped.get(one, one) for name, one in own.items() if one not in kept}
    return inline, {name: kept[one] for name, one in own.items() if one in kept}
