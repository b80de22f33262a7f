"""Checkpoints of alpa-meta up to 0.1: `state.npz` and `checkpoint.json`. They are only read."""

from __future__ import annotations

import ast
import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from alpa_meta.checkpoints.manifest import CheckpointError, check_regular, read_text
from alpa_meta.checkpoints.saved_leaves import SavedLeaf
from alpa_meta.types import HostArray
from mesh_runtime import Part, StoredArray

_MALFORMED = (KeyError, TypeError, ValueError, SyntaxError, zipfile.BadZipFile)
_SCHEMA, _MANIFEST, _ARRAYS = "AlpaCheckpoint", "checkpoint.json", "state.npz"


class NpzArrays:
    """The arrays of an old checkpoint, by path."""

    def __init__(self, arrays: Mapping[str, HostArray]) -> None:
        self._arrays = arrays

    def leaves(self) -> dict[str, SavedLeaf]:
        """Return what is said of each array in the present form; the path is its name."""
        return {
            path: SavedLeaf(
                path=path, keys=(path,), name=path, dtype=str(one.dtype), shape=one.shape
            )
            for path, one in self._arrays.items()
        }

    def open(self, arrays: Iterable[StoredArray]) -> None:
        """Do nothing: all were read."""

    def part(self, part: Part) -> HostArray:
        """Return a part of an array."""
        box = tuple(slice(a, a + size) for a, size in zip(part.origin, part.shape, strict=True))
        return self._arrays[part.stored.name][box]

    def sharded(self, parts: Sequence[tuple[Part, Sharding]], host_bytes: int) -> list[jax.Array]:
        """Return parts of arrays laid out by shardings."""
        return [jax.device_put(self.part(part), sharding) for part, sharding in parts]


def is_npz(place: Path) -> bool:
    """Return whether a checkpoint is an old one."""
    return (place / _MANIFEST).exists()


def read_npz(place: Path, with_arrays: bool = True) -> tuple[int, Mapping[str, object], NpzArrays]:
    """Return step, settings and arrays of an old checkpoint."""
    path = place / _MANIFEST
    try:
        manifest = json.loads(read_text(path))
        if manifest["schema"] != _SCHEMA or manifest["version"] != 1:
            raise CheckpointError(f"{path}: is not a checkpoint of alpa")
        step, settings = int(manifest["step"]), dict(manifest["settings"])
        leaves = [(str(one["path"]), one["dtype"], one["shape"]) for one in manifest["leaves"]]
        if not with_arrays:
            return step, settings, NpzArrays({})
        found = _arrays(place / _ARRAYS, manifest["arrays_sha256"], leaves)
        if "step" in settings:  # of a user's program: a flat dict by path
            found = {ast.literal_eval(name[1:-1]): array for name, array in found.items()}
    except CheckpointError:
        raise
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from None
    except (*_MALFORMED, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{place}: is not a readable checkpoint: {reason}") from None
    return step, settings, NpzArrays(found)


def _arrays(
    path: Path, sha256: str, leaves: Sequence[tuple[str, str, Sequence[int]]]
) -> dict[str, HostArray]:
    """Return the arrays, of which none is larger than the file: they were never compressed."""
    check_regular(path)
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != sha256:
        raise CheckpointError(
            f"{path}: is damaged: its SHA-256 is {digest[:16]}..., but {_MANIFEST} says "
            f"{str(sha256)[:16]}..."
        )
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > path.stat().st_size:
        raise CheckpointError(
            f"{path}: unpacks to {unpacked} bytes from {path.stat().st_size}; checkpoints are not "
            "compressed"
        )
    found = {}
    with np.load(path, allow_pickle=False) as stored:
        for number, (name, dtype, shape) in enumerate(leaves):
            array = stored[f"leaf_{number}"]
            if str(array.dtype) != dtype:
                array = array.view(jnp.dtype(dtype))
            found[name] = array.reshape([int(size) for size in shape])
    return found
