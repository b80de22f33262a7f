import itertools

import matplotlib.image
import pytest
from attrs import evolve
from matplotlib.figure import Figure
from matplotlib.text import Text

from alpa_interchange import Instruction
from alpa_meta.planning.explanation import Alternative, Explanation
from alpa_meta.report.loss_figure import draw_loss
from alpa_meta.report.plan_changes import draw_explanation
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


@pytest.fixture
def drawn(monkeypatch):
    """Return the figures that are written, in order."""
    figures = []
    save = Figure.savefig

    def saved(figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def test_the_loss_is_drawn(tmp_path):
    path = tmp_path / "loss.png"
    draw_loss(path, [_step(number) for number in range(1, 100)], trigram=2.0, held_out=1.8)
    assert _is_drawn(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["loss.png"]


def test_the_mean_of_a_straight_loss_lies_on_it_and_no_label_on_a_line(tmp_path, drawn):
    steps = [evolve(_step(number), loss=5.0 - 0.01 * number) for number in range(1, 100)]
    draw_loss(tmp_path / "loss.png", steps, trigram=2.0, held_out=1.8)
    (axes,) = drawn[0].axes
    mean = axes.lines[1]
    at, loss = mean.get_data()
    assert (at[0], at[-1]) == (10.5, 89.5)  # of steps 1-20 and 80-99
    assert loss == pytest.approx(5.0 - 0.01 * at)
    assert not axes.texts
    assert "byte trigram, held-out: 2.000" in [
        text.get_text() for text in axes.get_legend().get_texts()
    ]


def test_the_loss_of_a_single_step_is_drawn(tmp_path):
    draw_loss(tmp_path / "loss.png", [_step(1)])
    assert _is_drawn(tmp_path / "loss.png")


def _overlapping(figure):
    """Return the texts of a figure that run into each other."""
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts]
    return [
        (one, other)
        for (one, box), (other, beside) in itertools.combinations(boxes, 2)
        if box.overlaps(beside)
    ]


@pytest.mark.sample(num_stages=2)
@pytest.mark.parametrize("num_stages", [1, 4, 2, 8, 16])
def test_texts_of_a_drawn_plan_do_not_run_into_each_other(tmp_path, make_plan, drawn, num_stages):
    found = Explanation(
        step_seconds=0.02,
        menu_seconds=0.02,
        lower_bound=0.01,
        alternatives=tuple(
            Alternative(
                decision="stages",
                where="",
                chosen="",
                instead=f"{number} stages, 128 microbatches, interleaved-1f1b",
                seconds=1e-3 * number,
                distinct=False,
            )
            for number in range(6)
        ),
    )
    draw_plan(tmp_path / "plan.png", make_plan(num_stages, 4), found)
    assert _is_drawn(tmp_path / "plan.png")
    assert not _overlapping(drawn[0])


def test_the_next_best_settings_are_drawn_beside_the_plan(tmp_path, make_plan, drawn):
    better = Alternative(
        decision="stages", where="", chosen="2 stages", instead="4 stages, gpipe", seconds=1e-3
    )
    none = Alternative(decision="submesh", where="stage 0", chosen="1 x 4 devices", instead="")
    found = Explanation(
        step_seconds=0.02, menu_seconds=0.02, lower_bound=0.01, alternatives=(none, better)
    )
    draw_plan(tmp_path / "plan.png", make_plan(2, 4), found)
    texts = [text.get_text() for text in drawn[0].findobj(Text)]
    assert "2 stages, 4 microbatches, 1f1b: 20 ms" in texts
    assert "4 stages, gpipe: +1 ms" in texts
    assert not any("1 x 4 devices" in text for text in texts)


def test_bars_of_an_explanation_are_told_apart_and_named(tmp_path, drawn):
    other = Alternative(decision="stages", where="", chosen="2 stages", instead="3 stages")
    found = Explanation(
        step_seconds=0.02,
        menu_seconds=0.02,
        lower_bound=0.01,
        alternatives=(
            evolve(other, instead="4 stages", seconds=-1e-3, distinct=False),
            evolve(other, seconds=2e-3),
            Alternative(
                decision="recomputation",
                where="layer 1",
                chosen="full",
                instead="none",
                seconds=1e-3,
                lacking_bytes=1e6,
                stage=0,
            ),
        ),
    )
    draw_explanation(tmp_path / "alternatives.png", found)
    (figure,) = drawn
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "recomputation of layer 1: none",
        "stages: 3 stages",
        "stages: 4 stages",
    ]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([5.0, 10.0, -5.0])
    assert len({bar.get_facecolor() for bar in axes.patches}) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "beyond the error of predictions",
        "within the error of predictions",
        "does not fit the memory",
    ]


def test_a_step_of_one_program_is_labelled_as_the_whole(tmp_path, drawn):
    run = Instruction(kind="run", task="train.0", phase="backward", microbatch=0)
    event = TraceEvent(0, run, 0.0, 1.0)
    draw_timeline(tmp_path / "timeline.png", [event], title="a step", mesh_names=["mesh 0"])
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["whole step"]


def _runs(count, seconds=1e-3):
    return [
        TraceEvent(
            0,
            Instruction(kind="run", task="forward.0", phase="forward", microbatch=number),
            number * seconds,
            (number + 1) * seconds,
        )
        for number in range(count)
    ]


def test_of_a_long_schedule_the_beginning_and_the_end_are_drawn(tmp_path, drawn):
    draw_timeline(tmp_path / "timeline.png", _runs(1000), title="a step", mesh_names=["mesh 0"])
    first, last = drawn[0].axes
    assert first.get_xlim() == (0.0, pytest.approx(50.0))
    assert last.get_xlim() == (pytest.approx(975.0), pytest.approx(1000.0))
    assert [axes.get_title(loc="left") for axes in (first, last)] == [
        "a step: the first 50 ms of 1 s",
        "the last 25 ms",
    ]


def test_a_short_schedule_is_drawn_whole(tmp_path, drawn):
    draw_timeline(tmp_path / "timeline.png", _runs(90), title="a step", mesh_names=["mesh 0"])
    assert [axes.get_xlim() for axes in drawn[0].axes] == [(0.0, pytest.approx(90.0))]


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
