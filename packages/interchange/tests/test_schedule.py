"""Tasks, task graphs and instructions: what they refuse, and that they survive a file."""

from typing import Any

import pytest

from alpa_interchange.document import from_json, to_json
from alpa_interchange.schedule import Instruction, PipelineSchedule, TaskGraph, TaskSpec


def task(**changes: object) -> TaskSpec:
    arguments: dict[str, Any] = {
        "name": "forward",
        "mesh": 0,
        "stage": 0,
        "phase": "forward",
        "inputs": ("weight", "batch"),
        "outputs": ("loss",),
    }
    return TaskSpec(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase": "sideways"}, "TaskSpec.phase must be one of"),
        ({"name": ""}, "TaskSpec.name must not be empty"),
        ({"donated": ("loss",)}, r"must be among its inputs, got \['loss'\]"),
    ],
)
def test_impossible_tasks_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**changes)


def test_a_graph_needs_a_home_for_every_input() -> None:
    with pytest.raises(ValueError, match="one mesh per input: 2, got 1"):
        TaskGraph(tasks=(), per_step=(), inputs=("a", "b"), home=(0,), outputs=())


def test_two_tasks_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"distinct names, got \['forward'\]"):
        TaskGraph(tasks=(task(), task()), per_step=(), inputs=(), home=(), outputs=())


def test_an_instruction_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="Instruction.kind must be one of"):
        Instruction(kind="wait")


def test_a_schedule_survives_a_round_trip_through_json() -> None:
    run = Instruction(
        kind="run", task="forward", phase="forward", microbatch=1, inputs=("weight", "batch@1")
    )
    send = Instruction(kind="send", inputs=("loss@1",), peer=1)
    schedule = PipelineSchedule(
        name="gpipe", num_stages=1, num_microbatches=2, programs=((run, send), ())
    )
    assert from_json(to_json(schedule), PipelineSchedule) == schedule
