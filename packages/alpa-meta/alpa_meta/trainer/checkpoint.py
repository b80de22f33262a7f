"""Checkpoints: the training state by the path of each leaf, whatever plan produced it.

A checkpoint is one directory `step-<number>` with `state.npz` (one array per leaf, read with
`allow_pickle=False`) and `checkpoint.json` (what they are, and their SHA-256). It is written beside
its place and renamed there, so a directory of that name is always whole. Nothing in it depends on
the plan, the number of stages or the devices: any plan can go on from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen

from alpa_interchange import DocumentError

SCHEMA = "AlpaCheckpoint"
VERSION = 1
MANIFEST = "checkpoint.json"
ARRAYS = "state.npz"
MAX_MANIFEST_BYTES = 1 << 26
_RAW = {1: np.uint8, 2: np.uint16}  # how dtypes that npz does not know are stored

Tree = TypeVar("Tree")


class CheckpointError(DocumentError):
    """A checkpoint cannot be read, or belongs to another program; the message says why."""


@frozen
class Checkpoint:
    """A checkpoint that was read: `leaves` maps the path of each leaf to its array."""

    path: Path
    step: int
    settings: Mapping[str, Any]  # what the writer needs to continue: options, text, seed
    leaves: Mapping[str, np.ndarray]


def save_checkpoint(
    folder: Path, state: Any, *, step: int, settings: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write `state` as `folder/step-<step>`, at once or not at all, and return that path.

    The newest `keep` checkpoints stay; older ones are removed once the new one is in place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    leaves = {path: np.asarray(jax.device_get(leaf)) for path, leaf in leaf_paths(state)}
    place = folder / f"step-{step:08d}"
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    try:
        arrays = {f"leaf_{index}": _storable(leaf) for index, leaf in enumerate(leaves.values())}
        with open(partial / ARRAYS, "wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
            stream.flush()
            os.fsync(stream.fileno())
        manifest = {
            "schema": SCHEMA,
            "version": VERSION,
            "step": step,
            "settings": dict(settings),
            "arrays_sha256": _sha256(partial / ARRAYS),
            "leaves": [
                {"path": path, "dtype": str(leaf.dtype), "shape": list(leaf.shape)}
                for path, leaf in leaves.items()
            ],
        }
        with open(partial / MANIFEST, "w") as text:
            json.dump(manifest, text, indent=1, sort_keys=True)
            text.flush()
            os.fsync(text.fileno())
        if place.exists():
            shutil.rmtree(place)
        os.rename(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in checkpoint_paths(folder)[:-keep]:
        shutil.rmtree(old)
    return place


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the newest checkpoint in `folder`; CheckpointError says what is wrong with it."""
    paths = checkpoint_paths(folder)
    if not paths:
        raise CheckpointError(f"{folder}: holds no checkpoint (a directory named step-<number>)")
    return _read(paths[-1])


def read_settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the newest checkpoint in `folder`, none if there is none to read."""
    paths = checkpoint_paths(folder)
    try:
        return dict(_read_manifest(paths[-1] / MANIFEST)["settings"]) if paths else {}
    except CheckpointError:
        return {}


def restore_state(checkpoint: Checkpoint, shapes: Tree) -> Tree:
    """Return the state of `checkpoint` as a pytree like `shapes`, of numpy arrays.

    CheckpointError lists the leaves that differ in path, shape or dtype.
    """
    wanted = dict(leaf_paths(shapes))
    differences = [f"{path} is missing" for path in wanted if path not in checkpoint.leaves]
    differences += [
        f"{path} is not in the program" for path in checkpoint.leaves if path not in wanted
    ]
    for path in wanted.keys() & checkpoint.leaves.keys():
        stored, need = checkpoint.leaves[path], wanted[path]
        if stored.shape != tuple(need.shape) or str(stored.dtype) != str(need.dtype):
            differences.append(
                f"{path} is {stored.dtype}{list(stored.shape)} in the checkpoint and "
                f"{need.dtype}{list(need.shape)} in the program"
            )
    if differences:
        shown = "\n  ".join(sorted(differences)[:8])
        more = f"\n  and {len(differences) - 8} more" if len(differences) > 8 else ""
        raise CheckpointError(
            f"{checkpoint.path}: belongs to another program; {len(differences)} leaves differ:\n"
            f"  {shown}{more}"
        )
    structure = jax.tree_util.tree_structure(shapes)
    leaves = [checkpoint.leaves[path] for path in wanted]
    state: Tree = jax.tree_util.tree_unflatten(structure, leaves)
    return state


def leaf_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return (path, leaf) for each leaf of a pytree, paths as in `jax.tree_util.keystr`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat]


def _read(path: Path) -> Checkpoint:
    manifest = _read_manifest(path / MANIFEST)
    arrays = path / ARRAYS
    try:
        digest = _sha256(arrays)
    except OSError as error:
        raise CheckpointError(f"{arrays}: cannot be read: {error.strerror}") from None
    if digest != manifest["arrays_sha256"]:
        raise CheckpointError(
            f"{arrays}: is damaged: its SHA-256 is {digest[:16]}..., but {MANIFEST} says "
            f"{str(manifest['arrays_sha256'])[:16]}...; "
            f"remove {path} to fall back on an older checkpoint"
        )
    leaves = {}
    try:
        with np.load(arrays, allow_pickle=False) as stored:
            for index, entry in enumerate(manifest["leaves"]):
                array = _restored(stored[f"leaf_{index}"], str(entry["dtype"]))
                leaves[str(entry["path"])] = array.reshape([int(size) for size in entry["shape"]])
        return Checkpoint(path, int(manifest["step"]), dict(manifest["settings"]), leaves)
    except (KeyError, TypeError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: is not a readable checkpoint: {error}") from None


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path}: is larger than {MAX_MANIFEST_BYTES} bytes")
        manifest = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise CheckpointError(f"{path}: is not a checkpoint of alpa (no schema {SCHEMA!r})")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: has version {manifest.get('version')!r}, but this reader knows {VERSION}; "
            "read it with the alpa-meta that wrote it"
        )
    missing = {"step", "settings", "arrays_sha256", "leaves"} - set(manifest)
    if missing:
        raise CheckpointError(f"{path}: has no {', '.join(sorted(missing))}")
    return manifest


def _storable(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "biufc" else array.view(_RAW[array.dtype.itemsize])


def _restored(array: np.ndarray, dtype: str) -> np.ndarray:
    if str(array.dtype) == dtype:
        return array
    return array.view(jnp.dtype(dtype))


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
