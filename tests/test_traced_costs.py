"""Layer costs of a short model, added up by the schedule, are what whole plans say.

`benchmarks/cost_traced.py` holds them together on measured runs, here small models stand for them.
"""

from pathlib import Path

import pytest
from attrs import evolve

from cost_model import TrainingRun, TransformerSpec, cluster

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

MODEL = TransformerSpec(hidden=512, layers=6, heads=8, seq=256, vocab=8192)
LLAMA = evolve(MODEL, gated=True, tied=False, kv_heads=4)


def run_of(devices: str, model: TransformerSpec = MODEL, **configuration) -> TrainingRun:
    return TrainingRun(model=model, cluster=cluster(devices), global_batch=16, **configuration)


CASES = {
    # The first stage's update comes last, so that it is to have fewer layers than the slowest.
    "few microbatches": run_of("p3.16xlarge:4", pipeline=4, micro_batch=8),
    "sequence parallel": run_of(
        "h100:4", LLAMA, tensor=2, data=2, micro_batch=2, sequence_parallel=True, dtype="bfloat16"
    ),
    # Without ZeRO every replica updates all: moments cut over replicas take half the update.
    "replicas": run_of("p3.16xlarge:2", data=2, micro_batch=8),
    "full": run_of("p3.16xlarge:2", tensor=2, micro_batch=4, recompute="full"),
    "selective": run_of("p3.16xlarge:2", pipeline=2, micro_batch=2, recompute="selective"),
}
# Layers that the planner recomputes, in place of what the step repeats.
BY_PLANNER = {"selective by the planner": "selective", "full by the planner": "full"}


@pytest.mark.sample(case=3)
@pytest.mark.parametrize("case", [*CASES, *BY_PLANNER])
def test_layer_costs_agree_with_whole_plans(case, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from cost_traced import MOST_APART, cached_point, planned_run

    again = BY_PLANNER.get(case, "none")
    run = evolve(CASES[again], recompute="none") if case in BY_PLANNER else CASES[case]
    planned = planned_run(run, run.cluster, again).plan
    point = cached_point(run, run.cluster, again)
    assert point is not None
    assert point.seconds == pytest.approx(planned.step_seconds, rel=MOST_APART)
