"""Errors of the program that a user gave to a command, told without the frames that called it."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_OURS = ("alpa_meta", "alpa_interchange", "mesh_runtime", "stage_dp", "cost_model", "ilp_sharding")


def program_traceback(error: BaseException) -> str | None:
    """Return the traceback of an error from the first line of the user's program on; None where no
    line of it is on the way to the error."""
    inside = tuple(_library_folders())
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith(inside):
        return "".join(traceback.format_exception(type(error), error, None, chain=False))
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(("<", *inside)):
        frame = frame.tb_next
    if frame is None:
        return None
    # The cause that jax gives an error tells only which of its frames it left out.
    chain = not type(error.__cause__).__module__.startswith("jax")
    return "".join(traceback.format_exception(type(error), error, frame, chain=chain))


def _library_folders() -> Iterator[str]:
    """Yield the folders of Python's, of others' and of our own modules."""
    yield str(Path(sys.executable).parent)  # the script that starts the command
    for kind in ("stdlib", "purelib", "platlib"):
        yield sysconfig.get_path(kind)
    for name in _OURS:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            yield str(Path(file).parent)
