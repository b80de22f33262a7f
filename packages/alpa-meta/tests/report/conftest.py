"""A hand-made plan of a pipeline, for tables and pictures."""

import pytest

from alpa_interchange import (
    DeviceMesh,
    Layer,
    LogicalMesh,
    MeshAxis,
    PlacedStage,
    ShardingSolution,
    ShardingSpec,
    StageCandidate,
    StagePlan,
    SubmeshSpec,
    TaskGraph,
    TaskSpec,
)
from alpa_interchange.plan import InputSummary, ParallelPlan, ProgramSummary, StageSharding
from cost_model import cluster


def _tasks(num_stages):
    if num_stages == 1:
        return [
            TaskSpec(
                name="train.0",
                mesh=0,
                stage=0,
                phase="backward",
                inputs=("batch",),
                outputs=("loss",),
            )
        ]
    tasks = []
    for stage in range(num_stages):
        read = ("batch",) if stage == 0 else (f"a{stage}",)
        tasks.append(
            TaskSpec(
                name=f"forward.{stage}",
                mesh=stage,
                stage=stage,
                phase="forward",
                inputs=read,
                outputs=(f"a{stage + 1}",),
            )
        )
        back = (f"a{stage + 1}",) if stage == num_stages - 1 else (f"d{stage + 1}", f"a{stage + 1}")
        tasks.append(
            TaskSpec(
                name=f"backward.{stage}",
                mesh=stage,
                stage=stage,
                phase="backward",
                inputs=back,
                outputs=(f"d{stage}",),
            )
        )
    return tasks


@pytest.fixture
def make_plan():
    """Return a function of (number of stages, number of microbatches) that makes a plan."""

    def make(num_stages, num_microbatches):
        graph = TaskGraph(
            tasks=tuple(_tasks(num_stages)),
            per_step=(),
            inputs=("batch",),
            home=(0,),
            outputs=("loss",) if num_stages == 1 else ("d0",),
        )
        size = max(8 // num_stages, 2)
        mesh = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=size // 2)))
        stages, shardings = [], []
        for stage in range(num_stages):
            candidate = StageCandidate(
                layer_start=stage,
                layer_stop=stage + 1,
                submesh=SubmeshSpec(num_hosts=1, devices_per_host=size),
                logical=mesh,
                num_microbatches=num_microbatches,
                forward_seconds=1e-3,
                backward_seconds=2e-3,
                step_seconds=5e-4,
            )
            ids = tuple(range(stage * size, (stage + 1) * size))
            stages.append(PlacedStage(candidate=candidate, device_ids=ids))
            shardings.append(
                StageSharding(
                    mesh=DeviceMesh(submesh=candidate.submesh, logical=mesh, device_ids=ids),
                    solution=ShardingSolution(
                        choice=(0,), objective=1.0, lower_bound=1.0, status="optimal", seconds=0.1
                    ),
                    problem_hash="0",
                    state_specs={
                        f"state.params['layer_{stage}']['w']": ShardingSpec((("x",), ("y",))),
                        f"state.opt_state[0].mu['layer_{stage}']['w']": ShardingSpec(
                            (("x",), ("y",))
                        ),
                    },
                    activation_specs={"hidden": ShardingSpec((("x",), (), ()))},
                    memory={"parameters": 4e6, "activations": 1e6 * (stage + 1)},
                )
            )
        inputs = [
            InputSummary(
                path=f"state{place}['layer_{stage}']['w']", shape=(64, 128), dtype="float32"
            )
            for place in (".params", ".opt_state[0].mu")
            for stage in range(num_stages)
        ]
        return ParallelPlan(
            program=ProgramSummary(
                fingerprint="0" * 64, inputs=tuple(inputs), num_ops=100, batch_size=16
            ),
            cluster=cluster(f"host:{size * num_stages}", measure=False),
            layers=tuple(
                Layer(
                    index=stage,
                    equivalence_class=0,
                    forward_flops=1e9 * (stage + 1),
                    backward_flops=2e9,
                    parameter_bytes=1e6,
                    boundary_bytes=1e5,
                )
                for stage in range(num_stages)
            ),
            stage_plan=StagePlan(
                stages=tuple(stages),
                num_microbatches=num_microbatches,
                schedule="1f1b",
                step_seconds=0.02,
                lower_bound=0.018,
                peak_bytes=(5e6,) * num_stages,
            ),
            shardings=tuple(shardings),
            tasks=graph,
            step_seconds=0.02,
            lower_bound=0.018,
        )

    return make
