"""Writes a run to its folder while it goes on: plan, metrics of each step, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from alpa_meta.trainer.checkpoint import save_checkpoint
from alpa_meta.trainer.metrics import MetricsFile, StepMetrics, read_metrics, write_metrics
from alpa_meta.trainer.run_folder import RunFolder


@define
class RunRecorder:
    """Records steps in `folder`, which it opens at the first one.

    So a run that cannot do even one step leaves nothing behind. `write_plan` writes the plan into
    the opened folder; `start` is the step the run begins after: 0 for a new one.
    """

    folder: RunFolder
    start: int
    write_plan: Callable[[RunFolder], None]
    settings: Mapping[str, Any]
    checkpoint_every: int
    say: Callable[[str], None] = lambda message: None
    steps: list[StepMetrics] = field(factory=list, init=False)
    state: Any = field(default=None, init=False)
    _saved: int = field(default=-1, init=False)
    _file: MetricsFile | None = field(default=None, init=False)

    def record(self, metrics: StepMetrics, state: Any) -> None:
        """Note one step and the state after it; save a checkpoint when one is due."""
        if self._file is None:
            self._file = self._open()
        self._file.append(metrics)
        self.steps.append(metrics)
        self.state = state
        if metrics.step % self.checkpoint_every == 0:
            self.save()

    def save(self) -> None:
        """Save a checkpoint of the last recorded step, unless that has been done."""
        if self.steps and self.steps[-1].step != self._saved:
            step = self.steps[-1].step
            save_checkpoint(self.folder.checkpoints, self.state, step=step, settings=self.settings)
            self._saved = step

    def close(self) -> None:
        """Save what is not saved yet, also when training was interrupted, and close the files."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.save()

    def _open(self) -> MetricsFile:
        if self.start == 0:
            moved = self.folder.make()
            if moved is not None:
                self.say(f"the run that was in {self.folder.path}/ is now in {moved}/")
            known = []
        else:
            known = read_metrics(self.folder.metrics) if self.folder.metrics.exists() else []
        write_metrics(self.folder.metrics, [step for step in known if step.step <= self.start])
        self.write_plan(self.folder)
        return MetricsFile(self.folder.metrics)
