"""Writes a run to its folder while it goes on: plan, metrics of each step, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic

from attrs import define, field

from alpa_meta.checkpoints.manifest import CheckpointError
from alpa_meta.checkpoints.saving import Saving, save
from alpa_meta.trainer.metrics import M, MetricsFile, read_metrics, write_metrics
from alpa_meta.trainer.run_folder import RunFolder
from alpa_meta.trainer.signals import StopSignals
from alpa_meta.types import Function, PyTree


@define
class RunRecorder(Generic[M]):
    """Records steps in `folder`, which it opens at the first one.

    So a run that cannot do even one step leaves nothing behind. `write_plan` writes the plan into
    the opened folder; `start` is the step the run begins after: 0 for a new one. `metrics` makes
    metrics of a line of their file, `begin_saving` begins a checkpoint. What cannot be written is
    said, and training goes on.
    """

    folder: RunFolder
    start: int
    write_plan: Callable[[RunFolder], object]
    settings: Mapping[str, object]
    checkpoint_every: int
    metrics: Function[M]
    say: Callable[[str], None] = lambda message: None
    begin_saving: Function[Saving] = save
    steps: list[M] = field(factory=list, init=False)
    state: PyTree = field(default=None, init=False)
    _saved: int = field(default=-1, init=False)
    _saving: Saving | None = field(default=None, init=False)
    _file: MetricsFile | None = field(default=None, init=False)

    def record(self, metrics: M, state: PyTree) -> None:
        """Note one step and the state after it; save a checkpoint when one is due."""
        if self._file is None:
            self._file = self._open()
        self._append(self._file, metrics)
        self.steps.append(metrics)
        self.state = state
        if metrics.step % self.checkpoint_every == 0:
            self.save()

    def save(self) -> None:
        """Begin a checkpoint of the last recorded step, unless that has been done."""
        if not self.steps or self.steps[-1].step == self._saved:
            return
        self._await_saving()
        self._saved = step = self.steps[-1].step
        folder = self.folder.checkpoints
        try:
            self._saving = self.begin_saving(
                folder, self.state, step=step, settings=self.settings, keep=2
            )
        except CheckpointError as error:
            self._not_saved(error)

    def close(self) -> None:
        """Save what is not saved yet, also when training was interrupted, and close the files."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.save()
            self._await_saving()

    def end_if_stopped(self, signals: StopSignals) -> None:
        """End the process if a signal came, once what was done is saved."""
        if signals.received is None:
            return
        done = f" after step {self.steps[-1].step}" if self.steps else ""
        saved = f"; go on with: alpa train --resume {self.folder.path}" if self._saved > 0 else ""
        self.say(f"stopped by {signals.received.name}{done}{saved}")
        raise SystemExit(signals.exit_status)

    def _await_saving(self) -> None:
        """Wait for the checkpoint under way: one at a time is written."""
        if self._saving is not None:
            try:
                self._saving.wait()
            except CheckpointError as error:
                self._not_saved(error)
            self._saving = None

    def _not_saved(self, error: CheckpointError) -> None:
        self._saved = -1
        self.say(f"warning: no checkpoint was saved: {error}; older ones are as they were")

    def _append(self, file: MetricsFile, metrics: M) -> None:
        try:
            file.append(metrics)
        except OSError as error:
            self.say(
                f"warning: step {metrics.step} is missing in {self.folder.metrics}: "
                f"{error.strerror}"
            )

    def _open(self) -> MetricsFile:
        if self.start == 0:
            moved = self.folder.make()
            if moved is not None:
                self.say(f"the run that was in {self.folder.path}/ is now in {moved}/")
            known: list[M] = []
        else:
            path = self.folder.metrics
            known = read_metrics(path, self.metrics, self.say) if path.exists() else []
        write_metrics(self.folder.metrics, [step for step in known if step.step <= self.start])
        self.write_plan(self.folder)
        return MetricsFile(self.folder.metrics)
