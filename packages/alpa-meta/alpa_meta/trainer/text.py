"""The training text: source files of the running Python's standard library, split by file."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen

from alpa_meta.errors import PlanError

SKIPPED_FOLDERS = ("__pycache__", "idle_test", "site-packages", "dist-packages", "test", "tests")
HELD_OUT_SHARE = 10  # one file in so many is held out

Bytes = npt.NDArray[np.uint8]


@frozen
class Text:
    """Training and held-out bytes: uint8 [bytes] each, the files joined by a zero byte."""

    train: Bytes
    held_out: Bytes
    num_train_files: int
    num_held_out_files: int
    fingerprint: str  # SHA-256 over both parts: a resumed run must find the same text


def read_text(
    root: Path | None = None, *, max_train_bytes: int = 3_000_000, max_file_bytes: int = 100_000
) -> Text:
    """Return the text under `root` (the standard library), about `max_train_bytes` to train on.

    Files are taken in the order of the SHA-256 of their relative path, and the same hash decides
    which are held out, so the same Python gives the same text on every machine. Larger files than
    `max_file_bytes` are left out: one of them would be a good part of the text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    train: list[bytes] = []
    held_out: list[bytes] = []
    num_train_bytes = 0
    for digest, path in sorted((_digest(path, root), path) for path in _source_files(root)):
        is_held_out = digest[0] % HELD_OUT_SHARE == 0
        if path.stat().st_size > max_file_bytes:
            continue
        if is_held_out:
            held_out.append(path.read_bytes())
        elif num_train_bytes < max_train_bytes:
            train.append(path.read_bytes())
            num_train_bytes += len(train[-1])
    if not train or not held_out:
        raise ValueError(
            f"the text needs at least one training and one held-out Python file, but {root} gave "
            f"{len(train)} and {len(held_out)}; is the standard library installed as source?"
        )
    parts = (_join(train), _join(held_out))
    fingerprint = hashlib.sha256(
        b"".join(hashlib.sha256(part.tobytes()).digest() for part in parts)
    ).hexdigest()
    return Text(*parts, len(train), len(held_out), fingerprint)


def batch_at(
    part: Bytes,
    step: int,
    *,
    seed: int,
    batch_size: int,
    length: int,
    rows: slice[int | None, int | None, None] = slice(None),
) -> Bytes:
    """Return the windows of training step `step`, or `rows` of them: uint8 [rows, length + 1].

    A function of its arguments only, so a resumed run reads what an uninterrupted one would.
    """
    random = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step]))
    starts = random.integers(0, _num_starts(part, length), size=batch_size)[rows]
    windows: Bytes = part[starts[:, None] + np.arange(length + 1)]
    return windows


def spaced_windows(
    part: Bytes, *, num_windows: int, length: int
) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Return evenly spaced windows, uint8 [num_windows, length + 1], and where each starts."""
    starts = np.linspace(2, _num_starts(part, length) - 1, num_windows).astype(np.int64)
    return part[starts[:, None] + np.arange(length + 1)], starts


def _num_starts(part: Bytes, length: int) -> int:
    num_starts = len(part) - length
    if num_starts < 4:
        raise PlanError(
            f"the context must be at least 4 bytes shorter than the text, which has {len(part)} "
            f"bytes, got {length}; give a smaller --context"
        )
    return num_starts


def _source_files(root: Path) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return found


def _digest(path: Path, root: Path) -> bytes:
    return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()


def _join(contents: list[bytes]) -> Bytes:
    return np.frombuffer(b"\0".join(contents), dtype=np.uint8)
