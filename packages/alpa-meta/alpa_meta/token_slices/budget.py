"""How many programs token slices may have: each slice has its own for each pass of each stage."""

from __future__ import annotations

import stage_dp
from alpa_meta.token_slices.values import SlicingError

MAX_PROGRAMS = 128
"""Compiling one takes XLA 1 to 1.5 CPU seconds for two layers of a GPT on host devices
(`examples/long_context.py`), so that many take minutes, and more hardly fill a pipeline better."""


def num_programs(num_stages: int, schedule: str, num_slices: int) -> int:
    """Return the programs of a sliced pipeline's passes."""
    rule = stage_dp.SCHEDULE_RULES[schedule]
    passes = 1 + rule.has_backward + rule.splits_backward
    return num_stages * passes * num_slices if num_stages > 1 else 1


def check_budget(num_stages: int, schedule: str, num_slices: int) -> None:
    """Raise SlicingError for a pipeline of more programs than are compiled."""
    count = num_programs(num_stages, schedule, num_slices)
    if count > MAX_PROGRAMS:
        each = count // num_slices
        raise SlicingError(
            f"{num_slices} token slices in {num_stages} stages under {schedule!r} are {count} "
            f"programs to compile, {each} for each slice; at most {MAX_PROGRAMS} are compiled: use "
            f"num_token_slices={MAX_PROGRAMS // each} or fewer stages"
        )
