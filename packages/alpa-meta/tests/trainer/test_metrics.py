import pytest

from alpa_meta.trainer.metrics import MetricsFile, StepMetrics, read_metrics, write_metrics


def _step(number):
    return StepMetrics(
        step=number,
        loss=1.0 / number,
        gradient_norm=0.5,
        learning_rate=0.01,
        step_seconds=0.1,
        tokens_per_second=100.0,
    )


def test_steps_come_back_as_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [_step(1)])
    file = MetricsFile(path)
    file.append(_step(2))
    file.close()
    assert read_metrics(path, StepMetrics) == [_step(1), _step(2)]


def test_a_last_line_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [_step(1), _step(2)])
    path.write_text(path.read_text()[:-5])
    assert read_metrics(path, StepMetrics) == [_step(1)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [_step(1), _step(2)])
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1"):
        read_metrics(path, StepMetrics)
