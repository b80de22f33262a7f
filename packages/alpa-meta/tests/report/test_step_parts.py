import pytest

from alpa_interchange import Instruction
from alpa_meta.report.step_parts import StepParts, mean_parts, step_parts
from mesh_runtime import TraceEvent


def run(mesh, start, stop, phase="forward", inputs=(), outputs=()):
    one = Instruction(kind="run", task=phase, phase=phase, inputs=inputs, outputs=outputs)
    return TraceEvent(mesh, one, start, stop)


def test_gaps_are_bubble_until_what_is_waited_for_is_made_and_transfer_from_then_on():
    events = [
        run(0, 0.0, 2.0, outputs=("h@0",)),
        run(0, 2.0, 4.0, outputs=("h@1",)),
        TraceEvent(1, Instruction(kind="receive", outputs=("h@0",), peer=0), 0.0, 3.0),
        TraceEvent(1, Instruction(kind="receive", outputs=("h@1",), peer=0), 0.0, 5.0),
        run(1, 3.0, 4.5, inputs=("h@0",)),  # made at 2, here at 3
        run(1, 5.0, 6.0, inputs=("h@1",)),  # made at 4, the mesh is free at 4.5
        run(1, 6.0, 6.5, phase="update"),
    ]
    parts = step_parts(events)
    assert parts[0] == StepParts(compute=4.0, update=0.0, transfer=0.0, bubble=2.5)
    assert parts[1] == StepParts(compute=2.5, update=0.5, transfer=1.5, bubble=2.0)
    assert {one.seconds for one in parts.values()} == {6.5}
    mean = mean_parts(parts)
    assert mean is not None and mean.transfer == pytest.approx(0.75)


def test_runs_that_overlap_are_counted_once():
    parts = step_parts([run(0, 0.0, 2.0), run(0, 1.0, 3.0)])
    assert parts[0] == StepParts(compute=3.0, update=0.0, transfer=0.0, bubble=0.0)


def test_a_step_that_was_not_traced_has_no_parts():
    assert step_parts([]) == {} and mean_parts({}) is None
