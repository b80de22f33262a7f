"""What the time of an executed step was spent on: compute, exposed transfers, bubble, update.

Of each mesh, with the runs of its programs one after another:

    compute    runs of the microbatches
    update     runs of the update, and of what is done once per step beside it
    transfer   before a run: from when the last value that it was sent had been made on its mesh
    bubble     the rest: waiting for such values to be made, and the step's beginning and end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from mesh_runtime import TraceEvent

_ONCE = ("update", "start")


@frozen(kw_only=True)
class StepParts:
    """The seconds of one mesh, or the mean over meshes; they add up to those of the step."""

    compute: float
    update: float
    transfer: float
    bubble: float

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.compute + self.update + self.transfer + self.bubble

    @property
    def busy(self) -> float:
        """The seconds in which the mesh computed."""
        return self.compute + self.update


def step_parts(events: Sequence[TraceEvent]) -> dict[int, StepParts]:
    """Return what each mesh spent an executed step on; nothing for a step that was not traced."""
    runs = [event for event in events if event.instruction.kind == "run"]
    if not runs:
        return {}
    first, last = min(run.start for run in runs), max(run.stop for run in runs)
    made = {(run.mesh, name): run.stop for run in runs for name in run.instruction.outputs}
    sources = {
        (event.mesh, name): event.instruction.peer
        for event in events
        if event.instruction.kind == "receive"
        for name in event.instruction.outputs
    }
    meshes = sorted({run.mesh for run in runs})
    return {
        mesh: _of_mesh([run for run in runs if run.mesh == mesh], first, last, made, sources)
        for mesh in meshes
    }


def _of_mesh(
    runs: Sequence[TraceEvent],
    first: float,
    last: float,
    made: Mapping[tuple[int, str], float],
    sources: Mapping[tuple[int, str], int | None],
) -> StepParts:
    compute = update = transfer = 0.0
    free = first
    for run in sorted(runs, key=lambda event: (event.start, event.stop)):
        start, stop = max(run.start, free), max(run.stop, free)
        seconds = stop - start
        if run.instruction.phase in _ONCE:
            update += seconds
        else:
            compute += seconds
        sent = [
            made[peer, name]
            for name in run.instruction.inputs
            if (peer := sources.get((run.mesh, name))) is not None and (peer, name) in made
        ]
        if sent:
            transfer += max(0.0, start - max(free, *sent))
        free = stop
    bubble = max(0.0, last - first - compute - update - transfer)
    return StepParts(compute=compute, update=update, transfer=transfer, bubble=bubble)


def mean_parts(parts: Mapping[int, StepParts]) -> StepParts | None:
    """Return the mean over the meshes, None for a step that was not traced."""
    if not parts:
        return None
    values, count = list(parts.values()), len(parts)
    return StepParts(
        compute=sum(one.compute for one in values) / count,
        update=sum(one.update for one in values) / count,
        transfer=sum(one.transfer for one in values) / count,
        bubble=sum(one.bubble for one in values) / count,
    )
