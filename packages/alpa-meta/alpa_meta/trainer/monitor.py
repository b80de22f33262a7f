"""What a run shows while it goes on: the parts of each step, slow meshes, files for collectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import asdict, define, field

from alpa_meta.report.prometheus import Sample, write_samples
from alpa_meta.report.step_parts import StepParts, mean_parts, step_parts
from alpa_meta.report.stragglers import Slow, Stragglers

if TYPE_CHECKING:
    from alpa_meta.api import AnyStep

PARTS = ("compute", "update", "transfer", "bubble")


@define
class Monitor:
    """Looks at the steps of a parallel step and writes the newest to `path`.

    What it finds is said once: a mesh that stays slow is not said again until it was fast.
    """

    parallel: AnyStep  # a ParallelStep that traces
    path: Path
    say: Callable[[str], None]
    parts: Mapping[int, StepParts] = field(factory=dict, init=False)
    _stragglers: Stragglers = field(factory=Stragglers, init=False)
    _said: set[int] = field(factory=set, init=False)
    _newest: list[Sample] = field(factory=list, init=False)

    def look(self) -> dict[str, float]:
        """Return the seconds of the parts of the last step, the mean over its meshes."""
        self.parts = step_parts(self.parallel.last_trace)
        mean = mean_parts(self.parts)
        return {} if mean is None else asdict(mean)

    def note(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Write a step that was looked at, and say which meshes are slow."""
        slow = self._stragglers.note(self.parts)
        for one in slow:
            if one.mesh not in self._said:
                self.say(f"warning: step {step}: {one}")
        self._said = {one.mesh for one in slow}
        self._newest = self._samples(step, seconds, values, slow)
        self._write(step, ended=False)

    def close(self) -> None:
        """Write that no step follows the newest one, if there was one."""
        if self._newest:
            self._write(int(self._newest[0].value), ended=True)

    def _write(self, step: int, *, ended: bool) -> None:
        try:
            write_samples(self.path, [*self._newest, Sample("alpa_ended", float(ended))])
        except OSError as error:
            self.say(f"warning: step {step} is missing in {self.path}: {error.strerror}")

    def _samples(
        self, step: int, seconds: float, values: Mapping[str, float], slow: list[Slow]
    ) -> list[Sample]:
        plan, supervisor = self.parallel.plan, self.parallel.supervisor
        return [
            Sample("alpa_step", float(step)),
            Sample("alpa_step_seconds", seconds),
            Sample("alpa_predicted_step_seconds", float(plan.step_seconds)),
            *(Sample("alpa_value", float(v), {"name": name}) for name, v in values.items()),
            *(
                Sample("alpa_mesh_seconds", getattr(one, part), {"mesh": str(mesh), "part": part})
                for mesh, one in self.parts.items()
                for part in PARTS
            ),
            *(Sample("alpa_mesh_slow", one.times, {"mesh": str(one.mesh)}) for one in slow),
            *(
                Sample("alpa_planned_bytes", float(nbytes), {"stage": str(stage)})
                for stage, nbytes in enumerate(plan.device_bytes)
            ),
            Sample("alpa_recoveries_total", float(supervisor.num_recoveries if supervisor else 0)),
        ]
