import json

from cost_model import simulate, trace_events, write_trace


def test_every_run_and_send_becomes_one_event_with_its_microseconds(pipeline, stage_seconds):
    result = simulate(pipeline(2, 3, lambda stage: 2 - stage), stage_seconds(2), lambda *_: 0.5)
    events = [event for event in trace_events(result) if event["ph"] == "X"]
    runs = [event for event in events if event["tid"] == 0]
    assert len(runs) == 2 * 3 * 2 and len(events) - len(runs) == 2 * 3
    first = next(event for event in runs if event["pid"] == 0)
    assert (first["name"], first["ts"], first["dur"], first["cat"]) == (
        "F0 #0",
        0.0,
        1e6,
        "forward",
    )


def test_the_file_is_valid_json_that_names_the_meshes(pipeline, stage_seconds, tmp_path):
    result = simulate(pipeline(2, 1, lambda stage: 1), stage_seconds(2))
    write_trace(result, tmp_path / "trace.json", ["left", "right"])
    document = json.loads((tmp_path / "trace.json").read_text())
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert names == ["left", "right"]
