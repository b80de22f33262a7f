from pathlib import Path

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


@pytest.mark.parametrize("damage", [b"{}", b'{"step": 1, "lo', b"\xff\xfe", b"3", b"\0" * 9])
def test_a_damaged_line_in_the_middle_is_said_and_left_out(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    said: list[str] = []
    write_metrics(path, [_step(1), _step(2)])
    path.write_bytes((damage + b"\n") * 2 + path.read_bytes() + damage)
    assert read_metrics(path, StepMetrics, said.append) == [_step(1), _step(2)]
    assert len(said) == 1
    assert "metrics.jsonl: line 1 is no line of metrics: " in said[0]
    assert said[0].endswith(", nor are 1 others; left out")


def test_a_full_disk_does_not_keep_the_file_from_being_closed():
    file = MetricsFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        file.append(_step(1))
    file.close()
