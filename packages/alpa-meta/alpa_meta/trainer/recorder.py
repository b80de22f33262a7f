"""Writes a run to its folder while it goes on: plan, metrics of each step, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic

from attrs import define, field

from alpa_meta.trainer.checkpoint import save_checkpoint
from alpa_meta.trainer.metrics import M, MetricsFile, read_metrics, write_metrics
from alpa_meta.trainer.run_folder import RunFolder


@define
class RunRecorder(Generic[M]):
    """Records steps in `folder`, which it opens at the first one.

    So a run that cannot do even one step leaves nothing behind. `write_plan` writes the plan into
    the opened folder; `start` is the step the run begins after: 0 for a new one. `metrics` makes
    metrics of a line of their file, `stored` the pytree of arrays that a checkpoint keeps of a
    state.
    """

    folder: RunFolder
    start: int
    write_plan: Callable[[RunFolder], None]
    settings: Mapping[str, Any]
    checkpoint_every: int
    metrics: Callable[..., M]
    stored: Callable[[Any], Any] = lambda state: state
    say: Callable[[str], None] = lambda message: None
    steps: list[M] = field(factory=list, init=False)
    state: Any = field(default=None, init=False)
    _saved: int = field(default=-1, init=False)
    _file: MetricsFile | None = field(default=None, init=False)

    def record(self, metrics: M, state: Any) -> None:
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
            state = self.stored(self.state)
            save_checkpoint(self.folder.checkpoints, state, step=step, settings=self.settings)
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
            known: list[M] = []
        else:
            path = self.folder.metrics
            known = read_metrics(path, self.metrics) if path.exists() else []
        write_metrics(self.folder.metrics, [step for step in known if step.step <= self.start])
        self.write_plan(self.folder)
        return MetricsFile(self.folder.metrics)
