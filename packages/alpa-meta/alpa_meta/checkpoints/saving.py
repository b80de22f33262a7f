"""`save`: a state into a folder, by the processes that hold it, while the training goes on."""

from __future__ import annotations

import json
import operator
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import jax
import numpy as np
from jax.experimental import multihost_utils

from alpa_meta.checkpoints.leaves import HeldLeaf, held_leaves
from alpa_meta.checkpoints.manifest import CheckpointError, write_manifest
from alpa_meta.checkpoints.orbax_files import OrbaxFiles, require_orbax
from alpa_meta.checkpoints.places import (
    checkpoint_paths,
    commit,
    later_than,
    new_partial,
    step_of,
)
from alpa_meta.types import PyTree
from mesh_runtime import (
    ArrayWriter,
    FileSums,
    Part,
    RemoteArray,
    StoreError,
    file_sums,
    save_remote,
)

if TYPE_CHECKING:
    from mesh_runtime.remote_array import Owner

_DONE = ".done-"  # what a process says it has written, for the first one
_POLL_SECONDS = 0.05
_OTHERS_SECONDS = 3600.0  # how long the first process waits for the others' disks


class Saving:
    """A checkpoint that is being written. The state may be used, and overwritten, meanwhile."""

    def __init__(self, finish: Callable[[], Path], name: str) -> None:
        self._finish = finish
        self._path: Path | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def done(self) -> bool:
        """Return whether it is written, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Return where the checkpoint is, once it is whole; CheckpointError says why it is not."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _run(self) -> None:
        try:
            self._path = self._finish()
        except Exception as error:
            self._error = error


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    step: SupportsIndex = 0,
    settings: Mapping[str, object] | None = None,
    keep: int | None = None,
    host_bytes: int | None = None,
) -> Saving:
    """Begin to write `state` as the checkpoint of a step in the folder `path`.

    Returns once the state may be overwritten: what is copied for that takes `host_bytes` of each
    host's memory at most (default: a quarter of what is free), beyond which it waits for the disk.
    `wait()` of what is returned waits for the rest; a process does not end before. Checkpoints of
    one folder appear in the order in which they were begun. The newest `keep` of them stay
    (default: all). `settings` are JSON values to find again.
    """
    require_orbax("alpa_meta.save")
    folder, begun = Path(path).absolute(), time.time()
    number = _number("step", step, 0)
    keep = None if keep is None else _number("keep", keep, 1)
    try:
        json.dumps(dict(settings or {}))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"settings must be a dict of JSON values: {error}") from None
    try:
        held, marked = held_leaves(state)
        partial = _agreed_partial(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}") from None
    name = f"checkpoints in {folder}"
    earlier = [thread for thread in threading.enumerate() if thread.name == name]
    try:
        orbax = OrbaxFiles(partial) if marked_leaves(marked) else None
        names = orbax.write_structure(marked) if orbax else {}
        named = [held[k].named(names.get(k, "")) for k in sorted(held)]
        waits = _start(partial, named, host_bytes or free_bytes() // 4)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (OSError, StoreError)):
            raise CheckpointError(_reason(folder, error)) from None
        raise

    def finish() -> Path:
        try:
            sums = FileSums()
            for wait in waits:
                sums.update(wait())
            if jax.process_index():
                return _reported(partial, number, sums)
            sums.update(_sums_of_others(partial, begun))
            if orbax is not None:
                orbax.merge()
            known = {partial / name for name in sums}
            rest = [one for one in partial.rglob("*") if one.is_file() and one not in known]
            sums.update(file_sums(partial, *rest))
            write_manifest(partial, number, settings or {}, [one.leaf for one in named], sums)
            for thread in earlier:
                thread.join()
            return commit(partial, number, later_than(folder, number), keep)
        except BaseException as error:
            if jax.process_index():
                _say(partial, {"error": [0, _reason(folder, error)]})
            else:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(_reason(folder, error)) from error

    return Saving(finish, name)


def _number(name: str, value: SupportsIndex, least: int) -> int:
    """Return an integer, which may be that of a state (an array of no dims)."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not least <= number < 10**18:
        raise ValueError(f"{name} must be at least {least} and below 10^18, got {number}")
    return number


def free_bytes() -> int:
    """Return the memory of this host that is free, 4 GiB if that cannot be told."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 4 << 30


def marked_leaves(marked: PyTree) -> bool:
    """Return whether a state has anything that orbax would write: it refuses what has not."""
    return bool(jax.tree.leaves(marked))


def _start(
    partial: Path, held: Sequence[HeldLeaf], host_bytes: int
) -> list[Callable[[], FileSums]]:
    """Start to write what this process and its workers hold; return what waits for each."""
    parts = [part for leaf in held for part in leaf.parts()]
    remote: dict[Owner, list[tuple[Part, RemoteArray]]] = {}
    local: list[tuple[Part, PyTree]] = []
    for part, array in parts:
        if isinstance(array, RemoteArray):
            remote.setdefault(array.owner, []).append((part, array))
        elif isinstance(array, jax.Array) or not jax.process_index():
            local.append((part, array))
    waits = [save_remote(partial, members, host_bytes) for members in remote.values()]
    if local:
        writer = ArrayWriter(partial, str(jax.process_index()), host_bytes)
        writer.write(local)
        waits.append(writer.finish)
    return waits


# ---------------------------------------------------------------------- several processes


def _agreed_partial(folder: Path) -> Path:
    """Return the directory that all processes of a `jax.distributed` group write in."""
    if jax.process_count() == 1:
        return new_partial(folder)
    name, failed = np.zeros(256, np.uint8), ""
    if jax.process_index() == 0:
        try:
            text = new_partial(folder).name.encode()
            name[: len(text)] = np.frombuffer(text, np.uint8)
        except OSError as error:
            failed = error.strerror or str(error)
    name = np.asarray(multihost_utils.broadcast_one_to_all(name)).astype(np.uint8)
    partial = folder / name.tobytes().rstrip(b"\0").decode()
    if partial == folder or not partial.is_dir():
        raise CheckpointError(
            f"{folder}: {failed or 'is not the same folder on all hosts, as checkpoints need'}"
        )
    return partial


def _reported(partial: Path, step: int, sums: FileSums) -> Path:
    """Tell the first process what this one wrote; return the checkpoint that it makes of it."""
    _say(partial, sums)
    while partial.exists():
        time.sleep(_POLL_SECONDS)
    made = [path for path in checkpoint_paths(partial.parent) if step_of(path) == step]
    if not made:
        raise StoreError("the first process could not finish it")
    return made[-1]


def _say(partial: Path, sums: Mapping[str, object]) -> None:
    said = partial / f"{_DONE}{jax.process_index()}"
    try:
        said.with_suffix(".tmp").write_text(json.dumps(sums))
        said.with_suffix(".tmp").rename(said)
    except OSError:  # then the first process has given up, or will
        pass


def _sums_of_others(partial: Path, begun: float) -> FileSums:
    """Return what the other processes wrote, once they say so."""
    sums = FileSums()
    for process in range(1, jax.process_count()):
        said = partial / f"{_DONE}{process}"
        while not said.exists():
            if time.time() - begun > _OTHERS_SECONDS:
                raise StoreError(f"process {process} did not finish writing")
            time.sleep(_POLL_SECONDS)
        found = json.loads(said.read_text())
        if "error" in found:
            raise StoreError(f"process {process}: {found['error'][1]}")
        sums.update({name: (size, sha) for name, (size, sha) in found.items()})
        said.unlink()
    return sums


def _reason(folder: Path, error: BaseException) -> str:
    """Return why a checkpoint could not be written, in one line."""
    if isinstance(error, OSError):
        return f"{folder}: cannot be written: {error.strerror or error}"
    text = str(error).partition("\n")[0]
    return text if text.startswith(str(folder)) else f"{folder}: cannot be written: {text}"
