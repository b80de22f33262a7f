"""The entry point of the command `alpa`: a user's mistake is one message and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alpa_meta.errors import NonFiniteError, PlanError
from alpa_meta.extras import EXTRA_OF, missing
from alpa_meta.stopping import CommandSignals, Stopped, stopped_by, stopped_of

EXIT_FAILED_RUN = 1
EXIT_USER_ERROR = 2


def main() -> None:
    """Run the command line of this process and exit with its status."""
    signals = CommandSignals()
    signals.begin()
    try:
        status = run(sys.argv[1:])
    except Exception:  # what came of a signal in code that turns it into another error
        if signals.received is None:
            raise
        status = _stopped(signals.received)
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Return the exit status of a command line; a user's mistake prints one message and gives 2."""
    try:
        from alpa_meta.commands import application

        application(arguments)(list(arguments), prog_name="alpa")
    except SystemExit as end:
        if (stopped := stopped_by(end)) is not None:
            return _stopped(stopped)
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt as error:
        return _stopped(stopped_of(error))
    except PlanError as error:
        return _refused(str(error))
    except NonFiniteError as error:
        _refused(f"{error.found}; nothing was updated, and the steps before it are saved")
        return EXIT_FAILED_RUN
    except ImportError as error:
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


def _stopped(found: Stopped) -> int:
    print(f"alpa: {found}", file=sys.stderr)
    return found.exit_status


def _refused(message: str) -> int:
    print(f"alpa: {message}", file=sys.stderr)
    return EXIT_USER_ERROR
