"""The entry point of the command `alpa`: a user's mistake is one message and exit status 2."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from alpa_meta.errors import NonFiniteError, PlanError
from alpa_meta.extras import EXTRA_OF, missing

EXIT_FAILED_RUN = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line of this process and exit with its status."""
    sys.unraisablehook = _interrupt_again
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Return the exit status of a command line; a user's mistake prints one message and gives 2."""
    try:
        from alpa_meta.commands import application

        application(arguments)(list(arguments), prog_name="alpa")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except PlanError as error:
        return _refused(str(error))
    except NonFiniteError as error:
        _refused(f"{error.found}; nothing was updated, and the steps before it are saved")
        return EXIT_FAILED_RUN
    except ImportError as error:
        if _is_interrupted(error):
            return EXIT_INTERRUPTED
        name = error.name or ""
        if name not in EXTRA_OF:
            raise
        return _refused(str(missing(name, "this command")))
    except ValueError as error:
        from alpa_interchange import DocumentError

        if not isinstance(error, DocumentError):
            raise
        return _refused(str(error))
    return 0


def _interrupt_again(swallowed: Any) -> None:
    """Send an interrupt again that Python could not raise. jax calls back from the garbage
    collector, where most of Ctrl-C arrives while modules are imported, and is dropped. It is sent
    when that collection has most likely ended: sent after 10 ms, half came a wait too late."""
    if swallowed.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(swallowed)
        return
    main = threading.main_thread().ident
    assert main is not None
    again = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT])
    again.daemon = True
    again.start()


def _is_interrupted(error: BaseException | None) -> bool:
    """Return whether an interrupt led to an error, as while compiled modules are imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _refused(message: str) -> int:
    print(f"alpa: {message}", file=sys.stderr)
    return EXIT_USER_ERROR
