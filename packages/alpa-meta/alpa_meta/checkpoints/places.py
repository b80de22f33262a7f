"""The checkpoints in a folder: `step-<number>`, each whole; and what interrupted saves left."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"step-(\d{1,18})(?:\.(\d{1,9}))?")  # step-8.1 replaces step-8
_PARTIAL = re.compile(r"\.partial-(.+)-(\d+)-[0-9a-f]+")
_FOREIGN_SECONDS = 86400.0
"""When what a process of another machine left is removed: whether it still runs cannot be asked."""


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first; other names are not looked at."""
    found = []
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    for path in entries:
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's name tells."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def later_than(folder: Path, step: int) -> list[Path]:
    """Return the checkpoints of later steps."""
    return [path for path in checkpoint_paths(folder) if step_of(path) > step]


def new_partial(folder: Path) -> Path:
    """Return a new directory to write a checkpoint in, having removed what dead processes left."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".partial-*"):
        if _is_left(path):
            shutil.rmtree(path, ignore_errors=True)
    name = f".partial-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    partial = folder / name
    partial.mkdir()
    return partial


def commit(partial: Path, step: int, later: Iterable[Path], keep: int | None) -> Path:
    """Make `partial` the checkpoint of a step, by one rename; return where it is.

    Those that are `later` belong to a course of training that was given up, or are damaged: they
    become `stale-<name>`. Of the others the newest `keep` stay.
    """
    folder = partial.parent
    same = [path for path in checkpoint_paths(folder) if step_of(path) == step]
    number = max((int((path.suffix or ".0")[1:]) for path in same), default=-1) + 1
    place = folder / (f"step-{step:08d}.{number}" if number else f"step-{step:08d}")
    os.rename(partial, place)
    _sync(folder)
    for path in same:
        shutil.rmtree(path, ignore_errors=True)
    for path in later:
        stale = path.with_name(f"stale-{path.name}")
        shutil.rmtree(stale, ignore_errors=True)
        if path.exists():
            path.rename(stale)
    if keep is not None:
        until = [path for path in checkpoint_paths(folder) if step_of(path) <= step]
        for path in until[:-keep]:
            shutil.rmtree(path, ignore_errors=True)
    return place


def _is_left(partial: Path) -> bool:
    """Return whether the process that began a partial checkpoint has ended."""
    match = _PARTIAL.fullmatch(partial.name)
    try:
        if match and match[1] == socket.gethostname():
            os.kill(int(match[2]), 0)
            return False
        return time.time() - partial.stat().st_mtime > _FOREIGN_SECONDS or match is None
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False


def _sync(folder: Path) -> None:
    """Put a rename in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot
        pass
    finally:
        os.close(descriptor)
