import math

import pytest

from alpa_meta.report.prometheus import Sample, read_samples, write_samples


def test_samples_are_read_as_they_were_written(tmp_path):
    samples = [
        Sample("alpa_step", 3.0),
        Sample("alpa_value", 0.25, {"name": 'odd "name"\\\n\r\x85é'}),
        Sample("alpa_value", math.inf, {"name": "loss"}),
        Sample("alpa_recoveries_total", 1.0),
    ]
    path = tmp_path / "metrics.prom"
    write_samples(path, samples)
    assert read_samples(path) == samples
    text = path.read_bytes().decode()
    assert "# TYPE alpa_step gauge\nalpa_step 3.0\n" in text
    assert text.count("# TYPE alpa_value gauge") == 1
    assert "# TYPE alpa_recoveries_total counter" in text
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.prom"]


def test_another_file_is_refused_with_its_line(tmp_path):
    (tmp_path / "x").write_text("# fine\nnot a line of it at all !\n")
    with pytest.raises(ValueError, match="x, line 2: is no line of Prometheus"):
        read_samples(tmp_path / "x")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"alpa_step x\n", b"alpa_step 1.0\nalpa_val"])
def test_what_is_cut_short_or_no_text_is_refused_with_its_place(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="x, line [12]: is no line"):
        read_samples(tmp_path / "x")
