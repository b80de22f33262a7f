"""Files that a command is asked to write, refused before any time is spent where they cannot be."""

from __future__ import annotations

from pathlib import Path

from alpa_meta.errors import PlanError


def check_file(path: Path | None, option: str, makes_folder: bool = False) -> None:
    """Refuse a file that cannot be written; `option` is the one that names it. What writes it may
    make its folder."""
    if path is None:
        return
    from alpa_interchange.document import why_unwritable  # with numpy, which --help does without

    why = why_unwritable(path, makes_folder=makes_folder)
    if why is not None:
        raise PlanError(f"{path}: cannot be written: {why}; choose another file with {option}")
