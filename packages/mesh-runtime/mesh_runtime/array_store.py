"""Arrays in a folder: written tile by tile by the processes that hold them, read box by box.

The format is that of orbax-checkpoint: zarr arrays in tensorstore's key-value database OCDBT. Every
process writes a database of its own, `ocdbt.process_<name>`, and a merge by reference makes one of
them. Chunks do not cross tiles, so no chunk is written by two processes.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from jax.sharding import Sharding
from numpy.typing import NDArray

from mesh_runtime.pieces import Box, box_of

CHUNK_BYTES = 32 << 20
"""The largest chunk: what a reader of a part of an array reads at least. 32 MiB takes 0.1 s of a
disk of 300 MB/s, so the latency of a chunk does not matter; larger ones only add memory."""
PROCESS_PREFIX = "ocdbt.process_"
_NODE_BYTES, _INLINE_BYTES = 100_000_000, 1024  # as orbax-checkpoint has them
_CONTEXT = {"cache_pool#nodes": {"total_bytes_limit": _NODE_BYTES}}
"""Keeps the nodes of a database in memory: without, each array reads them anew, and 2400 small ones
take 3.7 s instead of 0.7 s."""

FileSums: TypeAlias = dict[str, tuple[int, str]]
"""Size and SHA-256 of files, by their path in the folder."""


class StoreError(RuntimeError):
    """Arrays could not be written or read; the message says where and why."""


@frozen
class StoredArray:
    """An array of a folder; `name` is its key there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@frozen
class Part:
    """The box of an array that begins at `origin`, which some arrays of a program make up."""

    stored: StoredArray
    origin: tuple[int, ...]
    shape: tuple[int, ...]

    def box(self, within: Box) -> Box:
        """Return a box of this part as one of the stored array."""
        return tuple(
            (start + a, start + b) for start, (a, b) in zip(self.origin, within, strict=True)
        )


def chunk_shape(shape: Sequence[int], itemsize: int, tiles: Iterable[Box]) -> tuple[int, ...]:
    """Return the shape of chunks of at most `CHUNK_BYTES` that no tile cuts."""
    chunk = []
    for dim, extent in enumerate(shape):
        bounds = {bound for tile in tiles for bound in tile[dim]} - {0}
        chunk.append(math.gcd(extent, *bounds) or 1)
    for dim, extent in enumerate(shape):
        while (excess := -(-math.prod(chunk) * itemsize // CHUNK_BYTES)) > 1 and chunk[dim] > 1:
            if chunk[dim] == extent:  # no tile ends inside: any size will do
                chunk[dim] = max(1, extent // excess)
                break
            chunk[dim] //= _least_factor(chunk[dim])
    return tuple(chunk)


def tile_boxes(array: jax.Array) -> list[Box]:
    """Return the tiles of an array, also those on devices of other processes."""
    found = array.sharding.devices_indices_map(array.shape).values()
    return list(dict.fromkeys(box_of(index or (), array.shape) for index in found))


class ArrayWriter:
    """Writes arrays into a process's database of a folder while the program goes on.

    `write` copies tiles to the host and returns; at most `host_bytes` (or one tile) are held there
    at a time, so it waits for the disk when an array is larger than that.
    """

    def __init__(self, folder: Path, process: str, host_bytes: int) -> None:
        self._ts = _tensorstore()
        self._folder, self._base = folder, folder / f"{PROCESS_PREFIX}{process}"
        self._context = self._ts.Context(_CONTEXT)
        self._budget = _Budget(host_bytes)
        self._writes: list[Any] = []

    def write(self, parts: Sequence[tuple[Part, Any]]) -> None:
        """Start to write what this process holds of arrays: jax arrays, or numpy ones whole."""
        opened = {
            part.stored: self._ts.open(
                _spec(self._base, part.stored, writing=True),
                create=True,
                open=True,
                context=self._context,
            )
            for part, _ in parts
        }
        for part, array in parts:
            store = self._done(opened[part.stored])
            if not math.prod(part.stored.shape):  # orbax looks for a chunk of every array
                self._writes.append(store.kvstore.write("0", b""))
            for box, tile, nbytes in _tiles(array):
                if nbytes:
                    self._budget.take(nbytes)
                    self._put(store, part.box(box), tile(), nbytes)

    def _put(self, store: Any, box: Box, tile: NDArray[Any], nbytes: int) -> None:
        place = store[tuple(slice(start, stop) for start, stop in box)]
        raw = tile.view(place.dtype.numpy_dtype)
        written = place.write(raw, can_reference_source_data_indefinitely=True).commit
        written.add_done_callback(lambda _: self._budget.give(nbytes))
        self._writes.append(written)

    def finish(self) -> FileSums:
        """Return the files written, once all are on disk; StoreError says why one could not be."""
        for written in self._writes:
            self._done(written)
        self._writes.clear()
        return file_sums(self._folder, self._base)

    def _done(self, future: Any) -> Any:
        try:
            return future.result()
        except Exception as error:
            raise StoreError(f"{self._folder}: cannot be written: {first_line(error)}") from None


class ArrayReader:
    """Reads arrays of a folder whose databases were merged."""

    def __init__(self, folder: Path) -> None:
        self._ts = _tensorstore()
        self._folder = folder
        self._context = self._ts.Context(_CONTEXT)
        self._opened: dict[StoredArray, Any] = {}

    def open(self, arrays: Iterable[StoredArray]) -> None:
        """Begin to open arrays that will be read, all at once."""
        for stored in arrays:
            if stored not in self._opened:
                try:
                    spec = _spec(self._folder, stored)
                    opened = self._ts.open(spec, open=True, context=self._context)
                except (TypeError, ValueError, RuntimeError) as error:  # a name that is no text
                    raise self._unreadable(stored, error) from None
                self._opened[stored] = opened

    def part(self, part: Part) -> NDArray[Any]:
        """Return a part of an array."""
        return self._read(part.stored, part.box(tuple((0, extent) for extent in part.shape)))()

    def sharded(self, parts: Sequence[tuple[Part, Sharding]], host_bytes: int) -> list[jax.Array]:
        """Return parts of arrays laid out by shardings, of which each process reads its tiles.

        About `host_bytes` are read ahead.
        """
        self.open(part.stored for part, _ in parts)
        window: deque[tuple[int, Callable[[], jax.Array]]] = deque()
        ahead, made = 0, []
        for part, sharding in parts:
            nbytes, finish = self._sharded(part, sharding)
            window.append((nbytes, finish))
            ahead += nbytes
            while ahead > host_bytes:
                size, done = window.popleft()
                made.append(done())
                ahead -= size
        return made + [done() for _, done in window]

    def _sharded(self, part: Part, sharding: Sharding) -> tuple[int, Callable[[], jax.Array]]:
        """Return the bytes to read, and what makes the array of them."""
        indices = sharding.addressable_devices_indices_map(part.shape)
        places = {device: box_of(index or (), part.shape) for device, index in indices.items()}
        reads = {box: self._read(part.stored, part.box(box)) for box in set(places.values())}

        def finish() -> jax.Array:
            tiles = {box: read() for box, read in reads.items()}
            kind = sharding.memory_kind
            shards = [
                jax.device_put(tiles[box], jax.sharding.SingleDeviceSharding(one, memory_kind=kind))
                for one, box in places.items()
            ]
            return jax.make_array_from_single_device_arrays(part.shape, sharding, shards)

        itemsize = jnp.dtype(part.stored.dtype).itemsize
        return sum(math.prod(b - a for a, b in box) for box in reads) * itemsize, finish

    def _read(self, stored: StoredArray, box: Box) -> Callable[[], NDArray[Any]]:
        """Start to read a box; return what waits for it."""
        store = self._store(stored)
        future = store[tuple(slice(start, stop) for start, stop in box)].read()

        def wait() -> NDArray[Any]:
            try:
                raw = np.asarray(future.result())
            except Exception as error:
                raise self._unreadable(stored, error) from None
            return raw.view(jnp.dtype(stored.dtype))

        return wait

    def _store(self, stored: StoredArray) -> Any:
        self.open([stored])
        try:
            return self._opened[stored].result()
        except Exception as error:
            raise self._unreadable(stored, error) from None

    def _unreadable(self, stored: StoredArray, error: Exception) -> StoreError:
        return StoreError(f"{self._folder}: {stored.name!r} cannot be read: {first_line(error)}")


def file_sums(folder: Path, *places: Path) -> FileSums:
    """Return size and SHA-256 of every file under `places`, by its path in `folder`."""
    files = sorted(
        path for place in places for path in (place, *place.rglob("*")) if path.is_file()
    )
    with ThreadPoolExecutor(4) as pool:
        return dict(zip((str(f.relative_to(folder)) for f in files), pool.map(_sum, files)))


def _sum(path: Path) -> tuple[int, str]:
    with open(path, "rb") as stream:
        return path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()


def first_line(error: BaseException) -> str:
    """Return what an error says, without the specification that tensorstore appends."""
    text = str(error).partition(" [tensorstore_spec=")[0].partition(" [source locations=")[0]
    return text.splitlines()[0] if text else type(error).__name__


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "arrays in files need tensorstore: pip install 'mesh-runtime[checkpoint]'",
            name="tensorstore",
        ) from None
    return tensorstore


def _spec(base: Path, stored: StoredArray, writing: bool = False) -> dict[str, Any]:
    """Return tensorstore's description of an array of the database in `base`.

    Nothing is compressed: trained weights do not shrink, and what is read is never larger than the
    files are.
    """
    metadata: dict[str, Any] = {"shape": list(stored.shape), "compressor": None}
    config: dict[str, Any] = {}
    if writing:
        metadata["chunks"] = list(stored.chunks)
        config["config"] = {
            "max_inline_value_bytes": _INLINE_BYTES,
            "max_decoded_node_bytes": _NODE_BYTES,
            "compression": None,
        }
    return {
        "driver": "zarr",
        "dtype": _storage_dtype(stored.dtype),
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{base}/"},
            "path": f"{stored.name}/",
            "cache_pool": "cache_pool#nodes",
            **config,
        },
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


def _storage_dtype(dtype: str) -> str:
    """Return the dtype in the files: unsigned integers for what tensorstore does not know."""
    known = jnp.dtype(dtype)
    try:
        return str(_tensorstore().dtype(known).name)
    except (TypeError, ValueError):
        return f"uint{8 * known.itemsize}"


def _tiles(array: Any) -> Iterator[tuple[Box, Callable[[], NDArray[Any]], int]]:
    """Yield (box, what copies it to the host, bytes) of the tiles that this process writes."""
    if not isinstance(array, jax.Array):
        whole = np.asarray(array)
        yield tuple((0, extent) for extent in whole.shape), whole.copy, whole.nbytes
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            box = box_of(shard.index, array.shape)
            yield box, functools.partial(_on_host, shard.data), shard.data.nbytes


def _on_host(shard: jax.Array) -> NDArray[Any]:
    """Return a copy that no step overwrites.

    `np.asarray` would stay with the array as its value on the host, and on CPU keep a step from
    overwriting it.
    """
    if next(iter(shard.devices())).platform == "cpu":
        return np.array(shard)
    return np.asarray(jax.device_put(shard, shard.sharding.with_memory_kind("pinned_host")))


def _least_factor(number: int) -> int:
    return next((k for k in range(2, math.isqrt(number) + 1) if number % k == 0), number)


class _Budget:
    """Bytes of which at most `limit` are taken, or one larger piece."""

    def __init__(self, limit: int) -> None:
        self._limit, self._taken = limit, 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._taken -= nbytes
            self._changed.notify()
