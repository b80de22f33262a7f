"""Schedules as the per-rank CSV that `torch.distributed.pipelining` loads (`_load_csv`)."""

from __future__ import annotations

from stage_dp.schedules import Schedule

LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


def torch_csv(schedule: Schedule) -> str:
    """Return one line per mesh: its steps as stage, kind and microbatch, `0F0,0F1,...,2I0,2W0`.

    F is a forward, B a whole backward, I and W its parts by input and by weight.
    """
    return "".join(
        ",".join(f"{step.stage}{LETTERS[step.phase]}{step.microbatch}" for step in steps) + "\n"
        for steps in schedule.steps
    )
