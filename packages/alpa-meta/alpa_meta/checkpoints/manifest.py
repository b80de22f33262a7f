"""`alpa.json`: what a checkpoint holds, and the SHA-256 of each of its files and of itself."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from attrs import evolve, field, frozen
from attrs.validators import ge

from alpa_interchange import DocumentError, from_json, to_json
from alpa_meta.checkpoints.saved_leaves import SavedLeaf
from alpa_meta.types import Fields
from mesh_runtime import file_sums

MANIFEST = "alpa.json"
MAX_MANIFEST_BYTES = 1 << 26  # 100 bytes a file, 200 a leaf: some 10^5 of each

_UNSUMMED = "0" * 64


class CheckpointError(DocumentError):
    """A checkpoint cannot be written or read, or belongs to another program; the message says
    why."""


@frozen(kw_only=True)
class SavedFile:
    """A file of a checkpoint."""

    path: str
    size: int
    sha256: str


@frozen(kw_only=True)
class CheckpointManifest:
    """Everything about a checkpoint but its arrays; `sha256` is of its text with zeros there."""

    step: int = field(validator=ge(0))
    settings: str  # JSON
    leaves: tuple[SavedLeaf, ...]
    files: tuple[SavedFile, ...]
    sha256: str

    def sealed(self) -> str:
        """Return this manifest as text with its own sum."""
        text = to_json(evolve(self, sha256=_UNSUMMED))
        return text.replace(_UNSUMMED, _text_sum(text))


def write_manifest(
    folder: Path,
    step: int,
    settings: Mapping[str, object],
    leaves: Sequence[SavedLeaf],
    sums: Mapping[str, tuple[int, str]],
) -> None:
    """Write the manifest of a folder whose files have the given sizes and sums."""
    files = [SavedFile(path=path, size=size, sha256=sha) for path, (size, sha) in sums.items()]
    manifest = CheckpointManifest(
        step=step,
        settings=json.dumps(dict(settings), sort_keys=True),
        leaves=tuple(leaves),
        files=tuple(sorted(files, key=lambda file: file.path)),
        sha256=_UNSUMMED,
    )
    with open(folder / MANIFEST, "w") as stream:
        stream.write(manifest.sealed())
        stream.flush()
        os.fsync(stream.fileno())


def _text_sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint, sound in itself; CheckpointError says what is wrong."""
    path = folder / MANIFEST
    try:
        text = read_text(path)
        manifest = from_json(text, CheckpointManifest, source=str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except CheckpointError:
        raise
    except (DocumentError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from None
    whole = len(manifest.sha256) == len(_UNSUMMED)  # else replacing it may take any memory
    if not whole or _text_sum(text.replace(manifest.sha256, _UNSUMMED)) != manifest.sha256:
        raise CheckpointError(f"{path}: is damaged: it does not have the SHA-256 it names")
    for file in manifest.files:
        parts = PurePosixPath(file.path)
        if parts.is_absolute() or ".." in parts.parts:
            raise CheckpointError(f"{path}: names a file outside of it, {file.path!r}")
    for leaf in manifest.leaves:
        if fault := leaf.fault():
            raise CheckpointError(f"{path}: names a leaf, {leaf.path[:80]!r}, {fault}")
    settings_of(manifest, path)
    arrays = [leaf.stored for leaf in manifest.leaves if leaf.dtype]
    needed, held = sum(one.nbytes for one in arrays), sum(file.size for file in manifest.files)
    if needed > held or len(arrays) > held:
        raise CheckpointError(
            f"{path}: names arrays of {needed} bytes, but its files have {held}; nothing in a "
            "checkpoint is compressed"
        )
    return manifest


def read_text(path: Path) -> str:
    """Return the text of a file of a checkpoint, which is none that gives bytes without end."""
    check_regular(path)
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path}: is larger than {MAX_MANIFEST_BYTES} bytes")
    return path.read_text()


def check_regular(path: Path) -> int:
    """Return the size of a file; refuse what is none: a pipe or a device is read without end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: is damaged: it is no file")
    return found.st_size


def settings_of(manifest: CheckpointManifest, path: Path) -> Fields:
    """Return the settings that a manifest has as JSON."""
    try:
        found = json.loads(manifest.settings)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path}: is damaged: its settings are no JSON: {reason}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: is damaged: its settings are a {type(found).__name__}")
    return found


def check_files(folder: Path, manifest: CheckpointManifest) -> None:
    """Raise CheckpointError if a file is missing or not as it was written."""
    for file in manifest.files:
        path = folder / file.path
        try:
            size = check_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:  # a name with a zero byte
            raise CheckpointError(f"{folder}: names a file {file.path!r}: {error}") from None
        if size != file.size:
            raise CheckpointError(f"{path}: is damaged: it has {size} of {file.size} bytes")
    try:
        sums = file_sums(folder, *(folder / file.path for file in manifest.files))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None
    for file in manifest.files:
        found = sums[str(PurePosixPath(file.path))][1]
        if found != file.sha256:
            raise CheckpointError(
                f"{folder / file.path}: is damaged: its SHA-256 is {found[:16]}..., "
                f"but {MANIFEST} says {file.sha256[:16]}..."
            )
