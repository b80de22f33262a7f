"""`alpa top` and `alpa trace` on folders that are whole, damaged, moved or no runs."""

import os
import time

import pytest
from rich.console import Console

from alpa_interchange import Instruction
from alpa_meta.cli import run
from alpa_meta.report import run_commands
from alpa_meta.report.chrome_trace import write_trace
from alpa_meta.report.prometheus import Sample, write_samples
from mesh_runtime import TraceEvent

PARTS = ("compute", "update", "transfer", "bubble")


def samples(ended=0.0, slow=()):
    return [
        Sample("alpa_step", 7.0),
        Sample("alpa_step_seconds", 0.5),
        Sample("alpa_value", 2.5, {"name": "loss"}),
        *(
            Sample("alpa_mesh_seconds", 0.125, {"mesh": str(mesh), "part": part})
            for mesh in range(2)
            for part in PARTS
        ),
        *(Sample("alpa_mesh_slow", 2.25, {"mesh": str(mesh)}) for mesh in slow),
        Sample("alpa_ended", ended),
    ]


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a run whose last step was five minutes ago."""
    write_samples(tmp_path / "metrics.prom", samples())
    then = time.time() - 300
    os.utime(tmp_path / "metrics.prom", (then, then))
    return tmp_path


def top(capsys, folder):
    """Return what `alpa top` prints once."""
    assert run(["top", str(folder), "--once"]) == 0
    return capsys.readouterr().out


def refusal(capsys, *command):
    """Return the one line that a command is refused with."""
    assert run(list(command)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_that_was_killed_is_told_from_one_that_ended(capsys, folder):
    assert "no step for 5 min 0" in top(capsys, folder)
    write_samples(folder / "metrics.prom", samples(ended=1.0))
    shown = top(capsys, folder)
    assert "s ago" in shown and "ended" in shown and "no step" not in shown


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "metrics.prom: lacks 'alpa_step_seconds'; it is not what a run writes"),
        (b"alpa_step 5.0\nalpa_val", "line 2: is no line"),
        (b"\xff\xfe", "line 1: is no line"),
        (b"alpa_step x\n", "line 1: is no line"),
        (b'alpa_value{nam="x"} 2\n', "lacks 'name'; it is not what a run writes"),
        (b"alpa_step 1\nalpa_step_seconds 1\nalpa_mesh_seconds 1\n", "lacks 'mesh'"),
        (None, "metrics.prom: is not there; it appears with the first step of a run"),
    ],
)
def test_a_file_that_no_run_wrote_is_one_line(capsys, folder, content, expected):
    (folder / "metrics.prom").unlink()
    if content is None:
        (folder / "metrics.prom").mkdir()
    else:
        (folder / "metrics.prom").write_bytes(content)
    assert expected in refusal(capsys, "top", str(folder), "--once")


def test_a_run_that_is_moved_aside_while_it_is_watched_is_waited_for(
    capsys, folder, monkeypatch, tmp_path
):
    monkeypatch.setattr("alpa_meta.commands.console", lambda: Console(force_terminal=True))
    moments = iter([lambda: (folder / "metrics.prom").unlink(), lambda: None])

    def sleep(_):
        moment = next(moments, None)
        if moment is None:
            raise KeyboardInterrupt
        moment()

    monkeypatch.setattr("alpa_meta.report.run_commands.time.sleep", sleep)
    assert run(["top", str(folder)]) == 0
    assert "has gone; waiting" in " ".join(capsys.readouterr().out.split())


def test_a_terminal_of_forty_columns_shows_every_share(folder):
    terminal = Console(width=40, record=True, file=open(os.devnull, "w"))
    terminal.print(run_commands.view(samples(slow=[1]), 1.0, narrow=True))
    lines = terminal.export_text().splitlines()
    assert any(line.split() == ["mesh", *PARTS] for line in lines)
    assert [line.split() for line in lines].count(["1", "25%", "25%", "25%", "25%"]) == 1
    assert any("mesh 1 is 2.2 x slower than before" in line for line in lines)


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": [3]}', '{"traceEvents": 3}', None])
def test_a_timeline_that_no_run_wrote_is_one_line(capsys, tmp_path, content):
    if content is None:
        (tmp_path / "timeline.json").mkdir()
    else:
        (tmp_path / "timeline.json").write_text(content)
    assert "timeline.json: is not" in refusal(capsys, "trace", str(tmp_path))


def test_a_trace_that_cannot_be_written_is_one_line(capsys, tmp_path, monkeypatch):
    event = Instruction(kind="run", task="train.0", phase="backward", stage=0, outputs=("v",))
    write_trace(tmp_path / "timeline.json", {"executed": [TraceEvent(0, event, 0.0, 1.0)]})
    monkeypatch.setattr(run_commands, "load", lambda path, kind: None)
    monkeypatch.setattr(run_commands, "predicted_events", lambda plan: [])
    for out, why in [("nowhere/x.json", "No such file"), ("timeline.json/x", "Not a directory")]:
        line = refusal(capsys, "trace", str(tmp_path), "--out", str(tmp_path / out))
        assert "cannot be written: " + why in line and "--out" in line
