"""How long predictions and simulations take.

python -m pytest --benchmark-only benchmarks/cost_speed.py
"""

from __future__ import annotations

from alpa_interchange.mesh import MeshAxis
from alpa_interchange.schedule import Instruction, PipelineSchedule
from cost_model import (
    CostModel,
    TrainingRun,
    TransformerSpec,
    cluster,
    predict,
    simulate,
    simulate_shared,
)


def configurations() -> list[TrainingRun]:
    """Return 10,240 different configurations of GPT models on 64 A100."""
    devices, found = cluster("selene:64"), []
    for hidden in range(1024, 17 * 1024, 1024):
        for layers in range(8, 88, 8):
            model = TransformerSpec(hidden=hidden, layers=layers, heads=hidden // 64, seq=2048)
            for tensor in (1, 2, 4, 8):
                for pipeline in (1, 2, 4, 8):
                    for micro_batch in (1, 2, 4, 8):
                        found.append(
                            TrainingRun(
                                model=model, cluster=devices, global_batch=1024,
                                micro_batch=micro_batch, tensor=tensor, pipeline=pipeline,
                                data=64 // tensor // pipeline, recompute="full",
                            )
                        )  # fmt: skip
    return found


def one_forward_one_backward(stages: int, microbatches: int) -> PipelineSchedule:
    """Return 1F1B with sends, receives and frees, as the runtime executes it."""
    programs = []
    for stage in range(stages):
        program: list[Instruction] = []
        first, last = stage == 0, stage == stages - 1

        def forward(
            m: int, stage: int = stage, program: list[Instruction] = program,
            first: bool = first, last: bool = last,
        ) -> None:  # fmt: skip
            given = () if first else (f"a{stage - 1}@{m}",)
            if not first:
                program.append(Instruction(kind="receive", outputs=given, peer=stage - 1))
            made = (f"a{stage}@{m}",)
            program.append(Instruction(kind="run", task=f"F{stage}", inputs=given, outputs=made))
            if not last:
                program.append(Instruction(kind="send", inputs=made, peer=stage + 1))

        def backward(
            m: int, stage: int = stage, program: list[Instruction] = program,
            first: bool = first, last: bool = last,
        ) -> None:  # fmt: skip
            given = () if last else (f"g{stage + 1}@{m}",)
            if not last:
                program.append(Instruction(kind="receive", outputs=given, peer=stage + 1))
            made, own = (f"g{stage}@{m}",), f"a{stage}@{m}"
            program.append(
                Instruction(kind="run", task=f"B{stage}", inputs=(own, *given), outputs=made)
            )
            if not first:
                program.append(Instruction(kind="send", inputs=made, peer=stage - 1))
            program.append(Instruction(kind="free", inputs=(own, *given, *made)))

        early = min(microbatches, stages - stage)
        for m in range(early):
            forward(m)
        for m in range(microbatches):
            backward(m)
            if m + early < microbatches:
                forward(m + early)
        programs.append(tuple(program))
    return PipelineSchedule(
        name="1f1b", num_stages=stages, num_microbatches=microbatches, programs=tuple(programs)
    )


def test_predict_ten_thousand_configurations(benchmark):
    runs = configurations()
    assert len(set(runs)) == len(runs) > 10_000
    benchmark.pedantic(lambda: [predict(run) for run in runs], rounds=2, iterations=1)


def test_predict_one_configuration(benchmark):
    run = configurations()[1234]
    benchmark(lambda: predict(run))


def test_simulate_64_stages_with_512_microbatches(benchmark):
    schedule = one_forward_one_backward(64, 512)
    seconds = {f"F{k}": 1.0 for k in range(64)} | {f"B{k}": 2.0 for k in range(64)}
    sizes = {f"a{k}": 1.0 for k in range(64)}
    result = benchmark.pedantic(
        lambda: simulate(schedule, seconds, lambda *_: 0.1, value_bytes=sizes),
        rounds=3, iterations=1,
    )  # fmt: skip
    assert result.step_seconds > (512 + 63) * 3


def test_simulate_a_shared_processor_with_8_stages_and_64_microbatches(benchmark):
    schedule = one_forward_one_backward(8, 64)
    seconds = {f"F{k}": 1.0 for k in range(8)} | {f"B{k}": 2.0 for k in range(8)}
    result = benchmark(lambda: simulate_shared(schedule, seconds))
    assert abs(result.step_seconds - 64 * 3) < 1e-6


def test_collective_and_kernel_calls_of_a_planner(benchmark):
    model = CostModel(cluster("h100:16"))
    axes = (MeshAxis(name="x", size=8, bandwidth=3e11), MeshAxis(name="y", size=2, bandwidth=4e10))

    def both() -> float:
        sent = model.collective_seconds("all-reduce", 1e6, axes)
        return float(sent + model.compute_seconds(1e9, 1e6, "bfloat16"))

    benchmark(both)
