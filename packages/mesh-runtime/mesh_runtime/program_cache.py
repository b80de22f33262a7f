"""Compiled programs of workers on disk: one that takes another's place need not compile them anew.

XLA's programs for processors use the instructions of the one they were compiled on, so every kind
of processor has a folder of its own, in the user's cache. JAX finds a program there by what it is
made of: its text, the devices, XLA's version and its flags.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

MOST_BYTES = 2 << 30
"""Of all programs kept: those that were used longest ago go first. A stage of a model of 100 layers
takes some 5 MB."""
_SHORTEST_SECONDS = 0.05
"""Of compiling, for a program to be kept: reading one takes 5 to 20 ms."""


def keep_programs() -> Path | None:
    """Have JAX keep the programs of this process, before it compiles any; return where. None if it
    was told where, or not to."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return None
    folder = _cache_folder() / _processor()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return None  # others could give us programs of theirs
    except OSError:
        return None
    forget_oldest(folder, MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SHORTEST_SECONDS)
    return folder


def forget_oldest(folder: Path, most_bytes: int) -> None:
    """Remove the files of a folder that were used longest ago, until the rest has `most_bytes`."""
    total = 0
    for _, size, path in sorted(_files(folder), reverse=True):
        total += size
        if total > most_bytes:
            with suppress(OSError):  # another process removed it
                path.unlink()


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield (when it was last used, bytes, path) of each file."""
    for path in folder.iterdir():
        with suppress(OSError):
            found = path.stat()
            yield max(found.st_atime, found.st_mtime), found.st_size, path


def _cache_folder() -> Path:
    base = os.environ.get("ALPA_CACHE_DIR")
    if base:
        return Path(base) / "programs"
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "alpa" / "programs"


def _processor() -> str:
    """Return a name for processors with the same instructions."""
    found = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
        found += "\n".join(sorted(set(told)))
    return hashlib.sha256(found.encode()).hexdigest()[:16]
