"""Files that a command is asked to write, refused before any time is spent where they cannot be."""

from __future__ import annotations

import tempfile
from pathlib import Path

from alpa_meta.errors import PlanError


def check_file(path: Path | None, option: str, makes_folder: bool = False) -> None:
    """Refuse a file that cannot be written; `option` is the one that names it. What writes it may
    make its folder."""
    if path is None:
        return
    why = "Is a directory" if path.is_dir() else None
    folder = path.parent
    if makes_folder:
        folder = next(one for one in path.absolute().parents if one.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror
    if why is not None:
        raise PlanError(f"{path}: cannot be written: {why}; choose another file with {option}")
