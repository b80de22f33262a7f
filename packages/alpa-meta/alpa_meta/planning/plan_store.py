"""The folder that plans are kept in, a document per key; the least recently used go first."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

from alpa_interchange import ParallelPlan, load, save
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
    """Plans by key in `folder`, at most `max_bytes` of them together."""

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

    def save(self, key: str, plan: ParallelPlan) -> None:
        """Keep `plan` under `key`, whole or not at all, and drop what exceeds the limit."""
        save(plan, self._path(key))
        kept = 0
        for path, size in self._newest_first():
            kept += size
            if kept > self.max_bytes:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every plan."""
        for path, _ in self._newest_first():
            path.unlink(missing_ok=True)

    def sizes(self) -> list[int]:
        """Return the bytes of every plan."""
        return [size for _, size in self._newest_first()]

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _newest_first(self) -> list[tuple[Path, int]]:
        """Return every file, those that an interrupted process left half written, too."""
        found = []
        for path in self.folder.glob("*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process dropped it
            found.append((status.st_mtime_ns, path, status.st_size))
        return [(path, size) for _, path, size in sorted(found, reverse=True)]
