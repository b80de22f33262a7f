import matplotlib.image
import pytest

from alpa_interchange import Instruction
from alpa_meta.report.loss_figure import draw_loss
from alpa_meta.report.plan_figure import draw_plan
from alpa_meta.report.predicted_events import predicted_events
from alpa_meta.report.timeline_figure import draw_timeline
from alpa_meta.trainer.metrics import StepMetrics
from mesh_runtime import TraceEvent


def _step(number):
    return StepMetrics(
        step=number,
        loss=5.0 / number**0.3,
        gradient_norm=1.0,
        learning_rate=0.01,
        step_seconds=0.1,
        tokens_per_second=100.0,
    )


def _is_drawn(path):
    image = matplotlib.image.imread(path)
    return image.shape[0] > 100 and image.shape[1] > 100 and image.std() > 0.01


def test_the_loss_is_drawn(tmp_path):
    path = tmp_path / "loss.png"
    draw_loss(path, [_step(number) for number in range(1, 100)], trigram=2.0, held_out=1.8)
    assert _is_drawn(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["loss.png"]


def test_the_loss_of_a_single_step_is_drawn(tmp_path):
    draw_loss(tmp_path / "loss.png", [_step(1)])
    assert _is_drawn(tmp_path / "loss.png")


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_plans_are_drawn_whatever_their_number_of_stages(tmp_path, make_plan, num_stages):
    draw_plan(tmp_path / "plan.png", make_plan(num_stages, 4))
    assert _is_drawn(tmp_path / "plan.png")


def test_the_predicted_schedule_takes_the_time_of_a_filled_pipeline(make_plan):
    events = predicted_events(make_plan(2, 4))
    # (4 + 2 - 1) microbatches of 1 + 2 ms; a backward without an update task of its own also does
    # the update, 0.5 ms, on the last stage's microbatches and in the drain
    length = max(event.stop for event in events) - min(event.start for event in events)
    assert length == pytest.approx(5 * 3e-3 + 5 * 5e-4)


def test_executed_instructions_are_drawn(tmp_path):
    events = [
        TraceEvent(
            mesh, Instruction(kind="run", task="forward.0", phase="forward", microbatch=0), 0.1, 0.2
        )
        for mesh in range(2)
    ]
    events.append(TraceEvent(1, Instruction(kind="receive", outputs=("a@0",), peer=0), 0.2, 0.21))
    draw_timeline(tmp_path / "timeline.png", events, title="one step", mesh_names=["0", "1"])
    assert _is_drawn(tmp_path / "timeline.png")


def test_a_step_without_instructions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one instruction"):
        draw_timeline(tmp_path / "timeline.png", [], title="", mesh_names=[])
    assert list(tmp_path.iterdir()) == []
