"""The entry point of the command `alpa`: a user's mistake is one message and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alpa_meta.errors import NonFiniteError, PlanError
from alpa_meta.extras import EXTRA_OF, missing

EXIT_FAILED_RUN = 1
EXIT_USER_ERROR = 2


def main() -> None:
    """Run the command line of this process and exit with its status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Return the exit status of a command line; a user's mistake prints one message and gives 2."""
    try:
        from alpa_meta.commands import application

        application(arguments)(list(arguments), prog_name="alpa")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
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


def _refused(message: str) -> int:
    print(f"alpa: {message}", file=sys.stderr)
    return EXIT_USER_ERROR
