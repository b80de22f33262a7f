import numpy as np

from alpa_meta.trainer.metrics import StepMetrics, read_metrics
from alpa_meta.trainer.recorder import RunRecorder
from alpa_meta.trainer.run_folder import RunFolder


def _step(number):
    return StepMetrics(
        step=number,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=0.01,
        step_seconds=0.1,
        tokens_per_second=100.0,
    )


def _recorder(path, start=0, every=3):
    return RunRecorder(
        folder=RunFolder(path),
        start=start,
        write_plan=lambda folder: folder.plan.write_text("{}"),
        settings={},
        checkpoint_every=every,
        metrics=StepMetrics,
    )


def _state(number):
    return {"w": np.full(3, number, np.float32)}


def test_a_run_without_a_step_leaves_nothing_behind(tmp_path):
    _recorder(tmp_path / "run").close()
    assert list(tmp_path.iterdir()) == []


def test_closing_saves_the_last_step(tmp_path):
    recorder = _recorder(tmp_path / "run")
    for number in range(1, 6):
        recorder.record(_step(number), _state(number))
    recorder.close()
    checkpoint = RunFolder(tmp_path / "run").read_checkpoint()
    assert checkpoint.step == 5
    assert checkpoint.leaves["['w']"].tolist() == [5, 5, 5]
    assert len(list((tmp_path / "run" / "checkpoint").iterdir())) == 2  # steps 3 and 5


def test_resuming_cuts_the_metrics_back_to_the_checkpoint(tmp_path):
    recorder = _recorder(tmp_path / "run")
    for number in range(1, 6):
        recorder.record(_step(number), _state(number))
    recorder.close()
    again = _recorder(tmp_path / "run", start=3)
    again.record(_step(4), _state(4))
    again.close()
    assert [
        step.step for step in read_metrics(tmp_path / "run" / "metrics.jsonl", StepMetrics)
    ] == [1, 2, 3, 4]


def test_an_earlier_run_is_moved_aside(tmp_path):
    for _ in range(3):
        recorder = _recorder(tmp_path / "run")
        recorder.record(_step(1), _state(1))
        recorder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
