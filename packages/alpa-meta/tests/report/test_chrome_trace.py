import json

import pytest

from alpa_interchange import Instruction
from alpa_meta.report.chrome_trace import read_trace, write_trace
from mesh_runtime import TraceEvent

EVENTS = [
    TraceEvent(
        0,
        Instruction(kind="run", task="forward.0", phase="forward", microbatch=1, outputs=("h@1",)),
        0.0,
        0.25,
    ),
    TraceEvent(1, Instruction(kind="receive", outputs=("h@1",), peer=0, microbatch=1), 0.0, 0.5),
]


def test_runs_and_transfers_stand_in_lanes_of_their_mesh_and_are_read_again(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, {"executed": EVENTS})
    assert read_trace(path) == EVENTS
    found = json.loads(path.read_text())["traceEvents"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in found if one["ph"] == "M"}
    assert names[0, 0] == "mesh 0" and names[0, 1001] == "mesh 1 transfers"
    run = next(one for one in found if one["ph"] == "X")
    assert (run["name"], run["ts"], run["dur"]) == ("forward.0 #1", 0.0, 250000.0)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ValueError, match="x.json: is not the trace of an executed step"):
        read_trace(tmp_path / "x.json")
