"""Arrays of Ray workers in files: every worker writes and reads its own tiles.

Of what is written and read nothing passes through the driver. The folder must be one that all nodes
see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mesh_runtime.array_store import FileSums, Part, StoreError, first_line
from mesh_runtime.ray_workers import RayWorkers, Worker
from mesh_runtime.remote_array import Buffer, RemoteArray

_POLL_SECONDS = 0.05  # between questions whether workers are done; a question takes some 1 ms


def save_remote(
    folder: Path, parts: Sequence[tuple[Part, RemoteArray]], host_bytes: int
) -> Callable[[], FileSums]:
    """Start to write arrays of one owner; return what waits for the files.

    Returns once steps may overwrite the arrays, each worker holding copies of `host_bytes`.
    """
    workers = _workers_of(parts[0][1].owner)
    by_mesh: dict[int, list[tuple[int, Part]]] = {}
    for part, array in parts:
        by_mesh.setdefault(array.meshes[0], []).append((array.buffer.number, part))
    writing = [worker for worker in workers.workers if worker.mesh in by_mesh]
    workers.work(
        "save",
        [(each, (str(folder), by_mesh[each.mesh], host_bytes)) for each in writing],
    )
    return lambda: _finished(workers, writing, folder)


def restore_remote(
    folder: Path, parts: Sequence[tuple[Part, RemoteArray]], host_bytes: int
) -> list[RemoteArray]:
    """Return parts of arrays of a folder, each on the meshes and in the layout of an array."""
    workers = _workers_of(parts[0][1].owner)
    numbers = [workers.new_number() for _ in parts]
    by_mesh: dict[int, list[Any]] = {}
    for number, (part, like) in zip(numbers, parts, strict=True):
        for mesh in like.meshes:
            by_mesh.setdefault(mesh, []).append((number, part, like.buffer.layout))
    reading = [worker for worker in workers.workers if worker.mesh in by_mesh]
    answers = workers.work(
        "restore", [(each, (str(folder), by_mesh[each.mesh], host_bytes)) for each in reading]
    )
    for _, refusal in answers:
        if refusal is not None:
            raise StoreError(refusal)
    return [
        RemoteArray(
            Buffer(workers, number, like.meshes, part.shape, part.stored.dtype, like.buffer.layout)
        )
        for number, (part, like) in zip(numbers, parts, strict=True)
    ]


def _workers_of(owner: Any) -> RayWorkers:
    assert isinstance(owner, RayWorkers)
    owner.check_open()
    return owner


def _finished(workers: RayWorkers, writing: Sequence[Worker], folder: Path) -> FileSums:
    """Return the files of all workers once they are on disk, asking beside the running step."""
    left, sums = list(writing), FileSums()
    while left:
        for worker in list(left):
            found = _ask(workers, worker, folder)
            if found is None:
                continue
            left.remove(worker)
            if isinstance(found, str):
                raise StoreError(found)
            sums.update(found)
        time.sleep(_POLL_SECONDS if left else 0)
    missing = [path for path in sums if not (folder / path).exists()]
    if missing:
        raise StoreError(
            f"{folder}: workers wrote {missing[0]!r} there, but this process does not see it; "
            "checkpoints need a folder that all nodes see"
        )
    return sums


def _ask(workers: RayWorkers, worker: Worker, folder: Path) -> FileSums | str | None:
    ask = worker.actor.saved.options(concurrency_group="data")
    timeout = workers.options.step_timeout
    try:
        found: FileSums | str | None = workers.ray.get(ask.remote(str(folder)), timeout=timeout)
    except Exception as error:
        raise StoreError(
            f"{folder}: {worker.name} did not finish writing: {first_line(error)}"
        ) from None
    return found
