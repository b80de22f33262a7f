"""The entry point of the command `alpa`: a user's mistake is one message and exit status 2, an
error that a user's program raises its traceback and 1."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from alpa_meta.errors import NonFiniteError, PlanError
from alpa_meta.extras import EXTRA_OF, missing
from alpa_meta.program_errors import program_traceback
from alpa_meta.stopping import CommandSignals, stopped_by

EXIT_FAILED_RUN = 1
EXIT_USER_ERROR = 2


def main() -> None:
    """Run the command line of this process and exit with its status."""
    signals = CommandSignals()
    signals.begin()
    status = run(sys.argv[1:], signals)
    # At the exit Python would look through all that was made for garbage: an interrupt 25 s into
    # planning GPT-39B on 64 V100 ended the process after 4.3 s, and does after 0.1 s.
    gc.freeze()
    sys.exit(status)


def run(arguments: Sequence[str], signals: CommandSignals | None = None) -> int:
    """Return the exit status of a command line; a user's mistake prints one message and gives 2, a
    signal prints which."""
    try:
        from alpa_meta.command_list import application

        application(arguments)(list(arguments), prog_name="alpa")
    except BaseException as error:
        # of a signal whatever may have come in code that does not hand it on
        stopped = (signals and signals.received) or stopped_by(error)
        if stopped is None:
            return _failed(error)
        print(f"alpa: {stopped}", file=sys.stderr)
        return stopped.exit_status
    return 0


def _failed(error: BaseException) -> int:
    """Return the exit status of a command that raised an error, having said what it is; what is no
    mistake of the user is raised on."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0
    from alpa_interchange import DocumentError  # with numpy, which --help does without

    if isinstance(error, PlanError | DocumentError):
        return _refused(str(error))
    if isinstance(error, NonFiniteError):
        _refused(f"{error.found}; nothing was updated, and the steps before it are saved")
        return EXIT_FAILED_RUN
    if isinstance(error, ImportError) and error.name in EXTRA_OF:
        return _refused(str(missing(str(error.name), "this command")))
    found = program_traceback(error) if isinstance(error, Exception) else None
    if found is None:
        raise error
    print(f"alpa: the program raised an error\n{found}", end="", file=sys.stderr)
    return EXIT_FAILED_RUN


def _refused(message: str) -> int:
    print(f"alpa: {message}", file=sys.stderr)
    return EXIT_USER_ERROR
