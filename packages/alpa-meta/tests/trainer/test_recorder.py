import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_meta.trainer.metrics import StepMetrics, read_metrics
from alpa_meta.trainer.recorder import RunRecorder
from alpa_meta.trainer.run_folder import RunFolder
from alpa_meta.trainer.signals import StopSignals


def _step(number):
    return StepMetrics(
        step=number,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=0.01,
        step_seconds=0.1,
        tokens_per_second=100.0,
    )


def _recorder(path, start=0, every=3, say=print):
    return RunRecorder(
        folder=RunFolder(path),
        start=start,
        write_plan=lambda folder: folder.plan.write_text("{}"),
        settings={},
        checkpoint_every=every,
        metrics=StepMetrics,
        say=say,
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
    checkpoint = RunFolder(tmp_path / "run").read_checkpoint(print)
    assert checkpoint.step == 5
    assert checkpoint.restore()["w"].tolist() == [5, 5, 5]
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


@pytest.mark.fault(
    "full disk, folder that cannot be written",
    "a warning while training, refused at the start",
)
def test_a_checkpoint_that_cannot_be_written_is_said_and_older_ones_stay(tmp_path):
    said: list[str] = []
    recorder = _recorder(tmp_path / "run", say=said.append)
    for number in range(1, 4):
        recorder.record(_step(number), _state(number))
    recorder._await_saving()
    folder = RunFolder(tmp_path / "run")
    moved = folder.checkpoints.rename(tmp_path / "elsewhere")
    folder.checkpoints.write_text("no folder")
    for number in range(4, 8):
        recorder.record(_step(number), _state(number))
    recorder.close()
    assert len(said) == 2  # of steps 6 and 7
    assert "warning: no checkpoint was saved" in said[0] and "older ones are as they" in said[0]
    assert [path.name for path in moved.iterdir()] == ["step-00000003"]


def test_state_that_the_failed_step_overwrote_hides_no_error(tmp_path):
    said: list[str] = []
    recorder = _recorder(tmp_path / "run", say=said.append)
    state = jnp.ones(3)
    recorder.record(_step(1), state)
    jax.jit(lambda x: x + 1, donate_argnums=0)(state)
    recorder.close()
    assert "was given away to a step" in said[0]


def test_a_signal_ends_the_process_with_its_status_once_all_is_saved(tmp_path):
    said: list[str] = []
    recorder = _recorder(tmp_path / "run", say=said.append)
    with StopSignals() as signals:
        recorder.record(_step(1), _state(1))
        recorder.end_if_stopped(signals)
        os.kill(os.getpid(), signal.SIGTERM)
        recorder.close()
        with pytest.raises(SystemExit) as end:
            recorder.end_if_stopped(signals)
    assert end.value.code == 143
    assert "stopped by SIGTERM after step 1; go on with: alpa train --resume" in said[0]
    assert RunFolder(tmp_path / "run").read_checkpoint(print).step == 1
