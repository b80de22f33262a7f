"""When each instruction of a step ran: the events a timeline is drawn from."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence

import jax
from attrs import evolve, frozen

from alpa_interchange.schedule import Instruction

TRACE_MODES = ("none", "dispatch", "ready", "blocking")


@frozen
class TraceEvent:
    """One executed instruction: `start` and `stop` in seconds since the step began."""

    mesh: int
    instruction: Instruction
    start: float
    stop: float


@frozen
class Timing:
    """The `position`-th instruction of a mesh: `start` and `stop` in seconds since the step
    began."""

    mesh: int
    position: int
    start: float
    stop: float


class Recorder:
    """Times the instructions of one step.

    Mode "dispatch" notes when the host issued each instruction, "blocking" waits for its results
    before going on (exact durations, meshes one after another). "ready" leaves the step
    asynchronous: two watcher threads per mesh, one for runs and one for receives, wait for results
    in issue order, so that start = max(issue, previous run done, received inputs there) and stop =
    results there. Record an instruction before anything else waits for its results.
    """

    def __init__(self, mode: str, num_meshes: int) -> None:
        if mode not in TRACE_MODES:
            raise ValueError(f"trace must be one of {TRACE_MODES}, got {mode!r}")
        self.mode = mode
        self.origin = time.perf_counter()
        self._timings: list[Timing] = []
        self._received: dict[tuple[int, int], tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._watchers: dict[tuple[int, str], _Watcher] = {}
        if mode == "ready":
            for mesh in range(num_meshes):
                for kind in ("run", "receive"):
                    self._watchers[mesh, kind] = _Watcher(self)

    def now(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self.origin

    def record(
        self,
        mesh: int,
        position: int,
        kind: str,
        start: float,
        sent: Sequence[jax.Array],
        outputs: Sequence[jax.Array],
        received: Iterable[int] = (),
    ) -> None:
        """Note one issued instruction of a kind; `start` is when its issue began.

        A receive waits for what was `sent`, a run for the receives of its mesh at the positions
        `received`.
        """
        if self.mode == "blocking":
            _wait(outputs)
        watcher = self._watchers.get((mesh, kind))
        if watcher is not None:
            self._received[mesh, position] = tuple(received)
            watcher.items.put((Timing(mesh, position, start, start), sent, outputs))
            return
        self.add(Timing(mesh, position, start, self.now()))

    def add(self, timing: Timing) -> None:
        """Append a timing; called from any thread."""
        with self._lock:
            self._timings.append(timing)

    def finish(self) -> tuple[Timing, ...]:
        """Return all timings by start time, once every watched result is there."""
        for watcher in self._watchers.values():
            watcher.items.put(None)
        for watcher in self._watchers.values():
            watcher.thread.join()
        found = {(one.mesh, one.position): one for one in self._timings}
        for mesh, position in [at for at in self._received if at in found]:  # the others failed
            self._begin(found, mesh, position)
        return tuple(sorted(found.values(), key=lambda one: (one.start, one.stop, one.mesh)))

    def _begin(self, found: dict[tuple[int, int], Timing], mesh: int, position: int) -> None:
        """Start an instruction when all that it received was there.

        The watcher of the receives may wake after that of the runs: what a run reads was there by
        the time its results were, whatever was seen of it.
        """
        run = found[mesh, position]
        for at in self._received[mesh, position]:
            there = found[mesh, at]
            stop = min(there.stop, run.stop)
            found[mesh, at] = evolve(there, start=min(there.start, stop), stop=stop)
            run = evolve(run, start=max(run.start, stop))
        found[mesh, position] = run


class _Watcher:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.items: queue.SimpleQueue[
            tuple[Timing, Sequence[jax.Array], Sequence[jax.Array]] | None
        ] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        free = 0.0
        while (item := self.items.get()) is not None:
            issued, sent, outputs = item
            _wait(sent)
            start = max(free, self.recorder.now() if sent else issued.start)
            _wait(outputs)
            free = self.recorder.now()
            self.recorder.add(evolve(issued, start=start, stop=free))


def _wait(arrays: Sequence[jax.Array]) -> None:
    """Wait until `arrays` are computed; those already donated to a later run are passed over."""
    for array in arrays:
        try:
            array.block_until_ready()
        except RuntimeError as error:
            donated = array.is_deleted() or "deleted or donated" in str(error)
            if not donated:
                raise
