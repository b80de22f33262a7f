"""SIGINT (Ctrl-C) and SIGTERM (Slurm, Kubernetes) while a run trains: noted, acted on between
steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from alpa_meta.types import Private

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While it is entered, signals only set `received`: a step under way ends as always, so its
    state is whole. A second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Private] = {}
        self._wakeup = -1

    @property
    def exit_status(self) -> int:
        """What a shell expects of a process that a signal ended."""
        assert self.received is not None
        return 128 + self.received

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # elsewhere none can be set
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
            self._wakeup = signal.set_wakeup_fd(-1)  # of what ends the command at a signal
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._wakeup)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
