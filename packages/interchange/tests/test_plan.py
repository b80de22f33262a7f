"""The parallel plan: its file is golden, so that plans of today can be read tomorrow."""

import json
from pathlib import Path

import pytest
from attrs import evolve

from alpa_interchange import (
    ClusterSpec,
    DeviceMesh,
    DeviceSpec,
    HostGroup,
    InputSummary,
    Instruction,
    Layer,
    LinkSpec,
    LogicalMesh,
    MeshAxis,
    OperatorSharding,
    ParallelPlan,
    PipelineSchedule,
    PlacedStage,
    ProgramSummary,
    ShardingSolution,
    ShardingSpec,
    StageCandidate,
    StagePlan,
    StageSharding,
    Strategy,
    SubmeshSpec,
    TaskGraph,
    TaskSpec,
)
from alpa_interchange.document import DocumentError, from_json, load, to_json
from alpa_interchange.plan_text import stage_rows

GOLDEN = Path(__file__).parent / "golden" / "plan.json"
OLD = {version: GOLDEN.with_name(f"plan-{version}.json") for version in ("0.1", "0.2")}


def plan(step_seconds: float = 1.25, lower_bound: float = 1.0) -> ParallelPlan:
    """Return a plan of two stages on two devices each."""
    mesh = LogicalMesh(axes=(MeshAxis(name="x", size=2, bandwidth=1e10, latency=1e-6),))
    submesh = SubmeshSpec(num_hosts=1, devices_per_host=2)
    device = DeviceSpec(name="cpu", memory=8e9, memory_bandwidth=2e10, peak_flops={"float32": 1e11})
    link = LinkSpec(name="memory", bandwidth=1e10, latency=1e-6)
    cluster = ClusterSpec(
        name="host",
        host_groups=(
            HostGroup(
                device=device, num_hosts=1, devices_per_host=4, intra_host=link, inter_host=link
            ),
        ),
    )
    layers = tuple(
        Layer(
            index=k,
            equivalence_class=0,
            forward_flops=1e6,
            backward_flops=2e6,
            parameter_bytes=4096.0,
            boundary_bytes=1024.0,
        )
        for k in range(2)
    )
    stages = tuple(
        PlacedStage(
            candidate=StageCandidate(
                layer_start=k,
                layer_stop=k + 1,
                submesh=submesh,
                logical=mesh,
                num_microbatches=2,
                forward_seconds=0.1,
                backward_seconds=0.2,
            ),
            device_ids=(2 * k, 2 * k + 1),
        )
        for k in range(2)
    )
    shardings = tuple(
        StageSharding(
            mesh=DeviceMesh(submesh=submesh, logical=mesh, device_ids=(2 * k, 2 * k + 1)),
            solution=ShardingSolution(
                choice=(0, 1), objective=0.5, lower_bound=0.5, status="optimal", seconds=0.01
            ),
            state_specs={f"state['w{k}']": ShardingSpec((("x",), ()))},
            operators=(
                OperatorSharding(
                    names=("jvp(mlp)/dot_general.0", "jvp(mlp)/dot_general.1"),
                    strategy=Strategy(
                        assignment=(("k", ("x",)),),
                        operands=(ShardingSpec(((), ("x",))), ShardingSpec((("x",), ()))),
                        results=(ShardingSpec(((), ())),),
                    ),
                    source="mlp.py:7",
                ),
            ),
            received_specs={"jvp(mlp)/tanh.0:0": ShardingSpec(((), ("x",)))} if k else {},
            activation_specs={},
            memory={"state": 2048.0, "activations": 512.0},
        )
        for k in range(2)
    )
    tasks = TaskGraph(
        tasks=(
            TaskSpec(
                name="forward.0",
                mesh=0,
                stage=0,
                phase="forward",
                inputs=("state['w0']",),
                outputs=("v0",),
            ),
        ),
        per_step=("state['w0']",),
        inputs=("state['w0']", "state['w1']"),
        home=(0, 1),
        outputs=(),
    )
    inputs = tuple(
        InputSummary(path=f"state['w{k}']", shape=(8, 8), dtype="float32") for k in range(2)
    )
    return ParallelPlan(
        program=ProgramSummary(fingerprint="f00d", inputs=inputs, num_ops=12, batch_size=8),
        cluster=cluster,
        layers=layers,
        stage_plan=StagePlan(
            stages=stages,
            num_microbatches=2,
            schedule="1f1b",
            step_seconds=1.25,
            lower_bound=1.0,
            peak_bytes=(2560.0, 2560.0),
            in_flight=(2, 1),
        ),
        shardings=shardings,
        tasks=tasks,
        step_seconds=step_seconds,
        lower_bound=lower_bound,
        provenance={"alpa-meta": "0.1.0"},
    )


def test_the_golden_file_is_what_a_plan_is_written_as() -> None:
    assert to_json(plan()) == GOLDEN.read_text()


def test_the_golden_file_is_read_as_the_plan() -> None:
    assert load(GOLDEN, ParallelPlan) == plan()


def test_a_plan_of_schema_0_1_is_read_without_its_operators() -> None:
    old = load(OLD["0.1"], ParallelPlan)
    assert old.cluster == plan().cluster
    assert [sharding.operators for sharding in old.shardings] == [(), ()]
    assert [sharding.problem_hash for sharding in old.shardings] == ["abc", "abc"]


def test_a_plan_of_schema_0_2_is_read_with_the_lists_that_it_has() -> None:
    run = Instruction(
        kind="run", task="forward.0", phase="forward", microbatch=0, outputs=("v0@0",)
    )
    lists = PipelineSchedule(name="1f1b", num_stages=2, num_microbatches=2, programs=((run,), ()))
    assert load(OLD["0.2"], ParallelPlan) == evolve(plan(), tasks=None, schedule=lists)


def test_a_plan_has_tasks_or_lists() -> None:
    with pytest.raises(ValueError, match="got neither"):
        evolve(plan(), tasks=None)
    lists = load(OLD["0.2"], ParallelPlan).schedule
    with pytest.raises(ValueError, match="got both"):
        evolve(plan(), schedule=lists)


def test_a_plan_says_its_numbers() -> None:
    assert plan().num_stages == 2
    assert plan().num_microbatches == 2
    assert plan().layer_cuts == (1,)
    assert plan().gap == pytest.approx(0.25)
    assert plan(step_seconds=1.0).gap == 0.0
    assert plan().shardings[0].peak_bytes == 2560.0


def test_devices_need_what_all_stages_that_they_run_need() -> None:
    assert plan().device_bytes == (2560.0, 2560.0)
    made = evolve(plan(), stage_plan=evolve(plan().stage_plan, device_bytes=(4096.0, 4096.0)))
    assert made.device_bytes == (4096.0, 4096.0)
    assert "4 KiB per device" in repr(made)
    assert all(row[-1] == "4 KiB" for row in stage_rows(made))


def test_negative_times_are_refused() -> None:
    with pytest.raises(ValueError, match="ParallelPlan.step_seconds must be at least 0"):
        plan(step_seconds=-1.0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("stage_plan", "stages"), None),
        (("shardings", 0, "mesh", "device_ids"), [0]),
        (("shardings", 1, "state_specs"), {"w": {"dims": [["x"], ["x"]]}}),
        (("tasks", "tasks", 0, "phase"), "jump"),
        (("tasks", "tasks", 0, "stage"), 2),
        (("tasks", "tasks", 0, "mesh"), 10**9),
        (("tasks", "tasks", 0, "mesh"), -1),
        (("tasks", "home"), [0, 2]),
        (("shardings",), []),
        (("stage_plan", "stages"), []),
        (("stage_plan", "peak_bytes"), [1.0]),
        (("stage_plan", "in_flight"), [1]),
        (("stage_plan", "num_microbatches"), 0),
        (("cluster", "host_groups", 0, "num_hosts"), 0),
        (("step_seconds",), "fast"),
    ],
)
def test_a_plan_with_an_impossible_part_is_refused(path: tuple[object, ...], value: object) -> None:
    document = json.loads(GOLDEN.read_text())
    place = document["value"]
    for name in path[:-1]:
        place = place[name]
    assert path[-1] in place
    place[path[-1]] = value
    with pytest.raises(DocumentError, match="is not a valid ParallelPlan"):
        from_json(json.dumps(document), ParallelPlan)


def test_a_plan_without_a_part_is_refused() -> None:
    for name in json.loads(GOLDEN.read_text())["value"]:
        document = json.loads(GOLDEN.read_text())
        del document["value"][name], document["sha256"]
        if name == "provenance":
            assert from_json(json.dumps(document), ParallelPlan).provenance == {}
            continue
        with pytest.raises(DocumentError, match="neither" if name == "tasks" else name):
            from_json(json.dumps(document), ParallelPlan)


def test_a_plan_that_was_edited_anywhere_is_refused_and_one_that_was_formatted_is_not() -> None:
    text = GOLDEN.read_text()
    plan = from_json(text, ParallelPlan)
    assert from_json(json.dumps(json.loads(text), indent=4), ParallelPlan) == plan
    for name, value in (("lower_bound", 0.0), ("provenance", {"jax": "0.0.1"})):
        document = json.loads(text)
        document["value"][name] = value
        with pytest.raises(DocumentError, match="was edited or damaged after it was written"):
            from_json(json.dumps(document), ParallelPlan)
        document["sha256"] = None
        with pytest.raises(DocumentError, match="was edited or damaged after it was written"):
            from_json(json.dumps(document), ParallelPlan)
        del document["sha256"]
        changed = from_json(json.dumps(document), ParallelPlan)
        assert changed != plan
        assert from_json(to_json(changed), ParallelPlan) == changed  # saved by whoever means it
