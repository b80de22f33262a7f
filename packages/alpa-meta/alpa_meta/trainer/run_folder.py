"""The folder of a run: its files by name, made only once there is something whole to put in it."""

from __future__ import annotations

import itertools
from pathlib import Path

from attrs import frozen

from alpa_meta.trainer.checkpoint import Checkpoint, CheckpointError, read_checkpoint


@frozen
class RunFolder:
    """Where a run keeps `plan.json`, `metrics.jsonl`, two pictures and its checkpoints."""

    path: Path

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

    def read_checkpoint(self) -> Checkpoint:
        """Return the newest checkpoint; CheckpointError if this is no run or it is damaged."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}: is not the folder of a run; give --resume what --out was"
            )
        return read_checkpoint(self.checkpoints)
