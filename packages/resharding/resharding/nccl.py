"""Carries out plans on GPUs: NCCL through CuPy, one communicator for all devices of both meshes.

Every process makes its communicators with the same unique id (`unique_id()` on one of them, sent to
the others as bytes). Bytes are moved as NCCL_UINT8, so every element type works. jax arrays are
read in place through dlpack; results are handed to jax the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from alpa_interchange.reshard import ReshardingPlan
from resharding.rank_executor import RankExecutor


def unique_id() -> bytes:
    """Return a new id that makes the communicators which share it one group."""
    from cupy.cuda import nccl

    made = nccl.get_unique_id()
    return made if isinstance(made, bytes) else bytes(value & 0xFF for value in made)


class NcclCommunicator:
    """One rank of an NCCL group on CUDA device `device_index` of this process.

    Follows `Communicator`: operations are put on one stream, in issue order. All ranks must
    construct theirs at the same time; several ranks in one process inside
    `cupy.cuda.nccl.groupStart/groupEnd`.
    """

    def __init__(self, group_id: bytes, size: int, rank: int, device_index: int) -> None:
        import cupy
        from cupy.cuda import nccl

        self.rank, self.size = rank, size
        self.device_index = device_index
        self._cupy, self._nccl = cupy, nccl
        probe = nccl.get_unique_id()
        key: Any = group_id if isinstance(probe, bytes) else tuple(group_id)
        with cupy.cuda.Device(device_index):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._communicator = nccl.NcclCommunicator(size, key, rank)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Issue the operations inside as one NCCL group."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def send(self, buffer: Any, peer: int, label: str) -> None:
        """Put a send of `buffer` on the stream."""
        self._move(self._communicator.send, buffer, peer, label)

    def receive(self, buffer: Any, peer: int, label: str) -> None:
        """Put a receive into `buffer` on the stream."""
        self._move(self._communicator.recv, buffer, peer, label)

    def abort(self) -> None:
        """Give up all outstanding operations; the communicator cannot be used afterwards."""
        self._communicator.abort()

    def _move(self, operation: Any, buffer: Any, peer: int, label: str) -> None:
        try:
            operation(buffer.data.ptr, buffer.nbytes, self._nccl.NCCL_UINT8, peer, self.stream.ptr)
        except self._nccl.NcclError as error:
            raise RuntimeError(
                f"NCCL refused {label} between ranks {self.rank} and {peer}: {error}"
            ) from error


class NcclExecutor:
    """One device's part of a plan on jax arrays; see `RankExecutor` for the order of operations."""

    def __init__(
        self,
        plan: ReshardingPlan,
        device: int,
        communicator: NcclCommunicator,
        rank_of: Mapping[int, int],
    ) -> None:
        import cupy

        self._cupy, self._communicator = cupy, communicator
        self._executor = RankExecutor(plan, device, communicator, rank_of, arrays=cupy)

    def run(self, shard: jax.Array | None, dtype: Any) -> jax.Array | None:
        """Return the target tile of this device as a jax array of `dtype`; waits for the transfers.

        Elements are moved as unsigned integers of their width, which CuPy has for every type of
        jax.
        """
        words = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
        with self._cupy.cuda.Device(self._communicator.device_index), self._communicator.stream:
            source = None
            if shard is not None:
                ready = shard.view(words).block_until_ready()
                source = self._cupy.from_dlpack(ready)
            result = self._executor.run(source, words)
            self._communicator.stream.synchronize()
        if result is None:
            return None
        return jnp.from_dlpack(result).view(dtype)
