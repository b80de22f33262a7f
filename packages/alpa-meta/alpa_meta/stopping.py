"""SIGINT and SIGTERM while the command `alpa` plans, compiles or starts workers: an end at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MARK = "ALPA_COMMAND"  # the variable that all processes have which a command started
_IMPORTING = "<frozen importlib._bootstrap>"
_PATIENCE_SECONDS = 1.0
"""What the main thread has to end after a signal: compiling a large program with XLA takes longer,
and hears of no signal meanwhile."""
_RAY_SECONDS = 5.0
"""The same where this process is connected to Ray, whose shutdown takes 1 to 2 s on two idle
cores."""


class Stopped(KeyboardInterrupt):
    """A signal ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)

    @property
    def exit_status(self) -> int:
        """What a shell expects of a process that a signal ended."""
        return 128 + self.signal

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


def stopped_of(interrupt: KeyboardInterrupt) -> Stopped:
    """Return which signal an interrupt is of."""
    return interrupt if isinstance(interrupt, Stopped) else Stopped(signal.SIGINT)


def stopped_by(error: BaseException | None) -> Stopped | None:
    """Return the signal that led to an error; None if none did."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return None if error is None else stopped_of(error)


class CommandSignals:
    """From `begin` on, the first of SIGINT and SIGTERM raises `Stopped` in the main thread, and the
    process is ended, with all it started, where that does not end within some seconds. It is ended
    at once while it imports modules, since compiled ones print and change what is raised in them,
    and while it waits for Ray, which may crash. Signals that the parent has ignored stay so; those
    that come later change nothing, so that what was started is ended in peace."""

    def __init__(self) -> None:
        self.received: Stopped | None = None

    def begin(self) -> None:
        """Take over the signals of this process."""
        sys.unraisablehook = self._again
        os.environ[_MARK] = f"{os.getpid()} at {time.time_ns()}"
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._stop)
        heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(heard,), daemon=True).start()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = Stopped(number)
            if _is_fragile(frame):
                _end(self.received)
            raise self.received

    def _watch(self, heard: int) -> None:
        """End the process some seconds after a signal; `StopSignals` keeps them from here."""
        while (number := os.read(heard, 1)[0]) not in _SIGNALS:
            pass
        ray = sys.modules.get("ray")
        connected = ray is not None and ray.is_initialized()
        time.sleep(_RAY_SECONDS if connected else _PATIENCE_SECONDS)
        _end(Stopped(number))

    def _again(self, swallowed: sys.UnraisableHookArgs) -> None:
        """Send a signal again that Python could not raise. jax calls back from the garbage
        collector, where most of Ctrl-C arrives while modules are imported, and is dropped. It is
        sent when that collection has most likely ended: sent after 10 ms, half came a wait too
        late."""
        found = stopped_by(swallowed.exc_value)
        if found is None:
            sys.__unraisablehook__(swallowed)
            return
        main = threading.main_thread().ident
        assert main is not None
        self.received = None
        again = threading.Timer(0.2, signal.pthread_kill, [main, found.signal])
        again.daemon = True
        again.start()


def _is_fragile(frame: FrameType | None) -> bool:
    """Return whether a module is being imported, or Ray is at work."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_filename == _IMPORTING or package == "ray":
            return True
        frame = frame.f_back
    return False


def _end(stopped: Stopped) -> None:
    for _ in range(3):  # what is killed may just have started others
        for process in _started():
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
    show_cursor = "\033[?25h" if os.isatty(2) else ""  # a bar hides it
    os.write(2, f"{show_cursor}alpa: {stopped}\n".encode())
    os._exit(stopped.exit_status)


def _started() -> Iterator[int]:
    """Yield the processes that this one has started, and those have, where the system lists them.
    Where Ray's node is killed, or ends by itself as on a busy machine, its agents are children of
    nobody we know, and end up to a minute later."""
    mark = f"{_MARK}={os.environ.get(_MARK)}".encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in place.read_bytes().split(b"\0") and int(place.parent.name) != os.getpid():
                yield int(place.parent.name)
