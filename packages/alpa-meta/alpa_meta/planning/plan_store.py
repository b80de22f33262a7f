"""The folder that plans are kept in, a document per key and its menu; the least recently used go
first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from alpa_interchange import KeptMenu, ParallelPlan, load, menu_path, save
from cost_model import cache_directory

MAX_BYTES = 256 << 20
"""What all stored plans may take: a plan of 48 layers takes 1 MB, one of a small model 0.1 MB."""

SWITCH = "ALPA_PLAN_CACHE"
_OFF = ("0", "off", "false", "no")


def is_switched_off() -> bool:
    """Return whether the environment variable ALPA_PLAN_CACHE says 0, off, false or no."""
    return os.environ.get(SWITCH, "").strip().lower() in _OFF


def plan_directory() -> Path:
    """Return the directory of the user's plans."""
    return cache_directory() / "plans"


@frozen
class PlanStore:
    """Plans by key in `folder`, each with its menu, at most `max_bytes` of them together."""

    folder: Path
    max_bytes: int = MAX_BYTES

    def load(self, key: str) -> ParallelPlan | None:
        """Return the plan of `key`, None if there is none; DocumentError if it is damaged."""
        path = self._path(key)
        if not path.exists():
            return None
        plan = load(path, ParallelPlan)
        os.utime(path)  # it is the most recently used now
        return plan

    def menu(self, key: str) -> Path | None:
        """Return the file of the menu that the plan of `key` was chosen from, None if none is
        kept."""
        path = menu_path(self._path(key))
        return path if path.exists() else None

    def save(self, key: str, plan: ParallelPlan, menu: KeptMenu | None = None) -> None:
        """Keep `plan` under `key`, whole or not at all, and drop what exceeds the limit."""
        if menu is not None:
            save(menu, menu_path(self._path(key)))
        save(plan, self._path(key))
        kept = 0
        for files, size in self._newest_first():
            kept += size
            if kept > self.max_bytes:
                _remove(files)

    def clear(self) -> None:
        """Remove every plan."""
        for files, _ in self._newest_first():
            _remove(files)

    def sizes(self) -> list[int]:
        """Return the bytes of every plan."""
        return [size for _, size in self._newest_first()]

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _newest_first(self) -> list[tuple[list[Path], int]]:
        """Return the files of every key and their bytes; what an interrupted process left half
        written, too."""
        found: dict[str, list[tuple[int, Path, int]]] = {}
        for path in self.folder.glob("*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process dropped it
            of_key = found.setdefault(path.name.partition(".")[0], [])
            of_key.append((status.st_mtime_ns, path, status.st_size))
        ordered = sorted(found.values(), key=max, reverse=True)
        return [([path for _, path, _ in files], sum(f[2] for f in files)) for files in ordered]


def _remove(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)
