"""The folder of a run: its files by name, made only once there is something whole to put in it."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from attrs import field, frozen

from alpa_interchange.amounts import format_bytes
from alpa_meta.checkpoints.manifest import CheckpointError
from alpa_meta.checkpoints.restoring import Checkpoint, read_checkpoint
from alpa_meta.errors import PlanError

_WRITTEN = frozenset({"plan", "metrics", "loss", "timeline", "trace", "checkpoint"})
"""What the names of the files of a run begin with."""


def _with_name(path: Path) -> Path:
    """Return a path with a name of its own, which "." and ".." have not."""
    return path.resolve() if path.name in ("", "..") else path


@frozen
class RunFolder:
    """Where a run keeps `plan.json`, `metrics.jsonl`, two pictures and its checkpoints."""

    path: Path = field(converter=_with_name)

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def loss_picture(self) -> Path:
        return self.path / "loss.png"

    @property
    def samples(self) -> Path:
        return self.path / "metrics.prom"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.json"

    @property
    def timeline_picture(self) -> Path:
        return self.path / "timeline.png"

    @property
    def plan_picture(self) -> Path:
        return self.path / "plan.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    def make(self) -> Path | None:
        """Make the folder; return where a run that was already there has been moved, if one was.

        An earlier run `run` becomes `run.1`, `run.2`, ...: training anew never destroys one.
        """
        moved = None
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            moved = next(
                place
                for number in itertools.count(1)
                if not (place := self.path.with_name(f"{self.path.name}.{number}")).exists()
            )
            self.path.rename(moved)
        self.path.mkdir(parents=True, exist_ok=True)
        return moved

    def check_writable(self) -> None:
        """Refuse a folder that cannot be written in, before any time is spent."""
        place = next(one for one in (self.checkpoints, *self.checkpoints.parents) if one.exists())
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            raise PlanError(
                f"{self.path}: cannot be written: {error.strerror}; choose another folder with "
                "--out"
            ) from None

    def check_new(self) -> None:
        """Refuse for a new run a folder that is no earlier run's, which `make` would move aside."""
        if Path.cwd().is_relative_to(self.path.resolve()):
            raise PlanError(
                f"{self.path}: a run cannot be written into the folder that alpa runs in, or one "
                "above; choose another folder with --out"
            )
        found = sorted(one.name for one in self.path.iterdir()) if self.path.is_dir() else []
        if found and not _WRITTEN & {name.lstrip(".").split(".")[0] for name in found}:
            raise PlanError(
                f"{self.path}: holds files that are no run's ({', '.join(found[:3])}); choose "
                "another folder with --out"
            )

    def check_room(self, nbytes: int) -> None:
        """Refuse a disk that has no room for one checkpoint of a state of so many bytes."""
        place = next(one for one in (self.checkpoints, *self.checkpoints.parents) if one.exists())
        free = shutil.disk_usage(place).free
        if free < nbytes:
            raise PlanError(
                f"{self.path}: a checkpoint takes {format_bytes(nbytes)}, but only "
                f"{format_bytes(free)} are free there; make room or choose another folder with "
                "--out"
            )

    def read_checkpoint(self, say: Callable[[str], None]) -> Checkpoint:
        """Return the newest sound checkpoint; CheckpointError if this is no run or has none."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}: is not the folder of a run; give --resume what --out was"
            )
        found = read_checkpoint(self.checkpoints)
        for note in (*found.passed_over, found.note):
            if note:
                say(note)
        return found
