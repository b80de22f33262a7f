"""How many programs token slices may have: each slice has its own for each pass of each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import stage_dp
from alpa_meta.token_slices.values import SlicingError

MAX_PROGRAMS = 128
"""Of the stages of one host, which compiles its own. Compiling one takes XLA 1 to 1.5 CPU seconds
for two layers of a GPT on host devices (`examples/long_context.py`), so that many take minutes, and
more hardly fill a pipeline better."""


def num_programs(num_stages: int, schedule: str, num_slices: int) -> int:
    """Return the programs of the passes of some stages of a sliced pipeline."""
    rule = stage_dp.SCHEDULE_RULES[schedule]
    return num_stages * (1 + rule.has_backward + rule.splits_backward) * num_slices


def check_budget(hosts: Sequence[Collection[int]], schedule: str, num_slices: int) -> None:
    """Raise SlicingError for a pipeline of more programs than a host compiles; `hosts` are those of
    each stage."""
    if len(hosts) == 1:  # a stage alone runs all slices as one program
        return
    stages = Counter(host for each in hosts for host in each)
    count = num_programs(max(stages.values()), schedule, num_slices)
    if count > MAX_PROGRAMS:
        each = count // num_slices
        raise SlicingError(
            f"{num_slices} token slices under {schedule!r} are {count} programs to compile on "
            f"one host, {each} for each slice; at most {MAX_PROGRAMS} are compiled: use "
            f"num_token_slices={MAX_PROGRAMS // each} or fewer stages"
        )
