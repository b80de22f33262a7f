import math
from typing import Any

import pytest
from attrs import evolve

from cost_model import TrainingRun, TransformerSpec, cluster
from cost_model.run_memory import (
    MemoryConstants,
    demanded_bytes,
    fit_probability,
    peak_memory,
    run_memory,
)
from cost_model.training_run import stage_layers

MODEL = TransformerSpec(hidden=2048, layers=16, heads=16, seq=2048)
RUN = TrainingRun(
    model=MODEL, cluster=cluster("h100:8"), global_batch=32, micro_batch=2, data=8,
    fused_attention=True, executor="megatron", dtype="bfloat16",
)  # fmt: skip


def test_each_level_of_sharding_holds_less():
    totals = [run_memory(evolve(RUN, zero_stage=level)).total for level in (0, 1, 2, 3)]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4
    sharded = run_memory(evolve(RUN, zero_stage=3))
    assert sharded.parameters == pytest.approx(run_memory(RUN).parameters / 8)


def test_the_fullest_stage_is_the_peak():
    staged = evolve(RUN, data=2, pipeline=4)
    totals = [run_memory(staged, stage).total for stage in (0, 3)]
    assert peak_memory(staged).total == max(totals)
    assert peak_memory(staged, stage=3).total == totals[1]


def test_slack_and_buffers_add_what_they_say():
    plain, loose = MemoryConstants(slack=1.0), MemoryConstants(slack=1.5)
    activations = run_memory(RUN, 0, plain).activations
    added = run_memory(RUN, 0, loose).total - run_memory(RUN, 0, plain).total
    assert added == pytest.approx(activations / 2)


def test_even_odds_where_the_prediction_is_the_capacity():
    assert fit_probability(0.0, 0.1) == pytest.approx(0.5)
    wide, narrow = math.log(80 / 72), math.log(80 / 88)
    assert fit_probability(wide, 0.05) > 0.95 > 0.05 > fit_probability(narrow, 0.05)


def test_routed_experts_are_held_where_they_live():
    sparse = evolve(MODEL, experts=8, experts_per_token=2, expert_width=4096)
    wide = evolve(RUN, model=sparse, expert=8)
    narrow = evolve(RUN, model=sparse, expert=1)
    saved = run_memory(narrow).parameters - run_memory(wide).parameters
    assert saved == pytest.approx(2 * sparse.expert_parameters * 16 * 7 / 8)


def nanotron(**more):
    settings: dict[str, Any] = {
        "data": 1,
        "tensor": 8,
        "sequence_parallel": True,
        "executor": "nanotron",
    }
    return evolve(RUN, **settings | more)


def test_a_host_that_runs_ahead_holds_gathered_inputs_of_every_layer():
    c, tokens = MemoryConstants(), 2 * 2048
    behind, ahead = (run_memory(nanotron(), 0, c, lead) for lead in (0.1, 10.0))
    held = ahead.communication - behind.communication
    # 16 microbatches, of which the first finds the host no further than the device
    whole = c.gathered * MODEL.layers * tokens * MODEL.hidden
    assert held == pytest.approx(whole * 15 / 16, rel=1e-5)
    alone = nanotron(tensor=1, data=8, sequence_parallel=False)
    assert run_memory(alone, 0, c, 10.0) == run_memory(alone, 0, c, 0.1)


def test_what_could_be_given_back_is_no_need_where_it_does_not_fit():
    c, large = MemoryConstants(), nanotron(micro_batch=128, global_batch=1024)
    most = demanded_bytes(large, c, 10.0)
    assert most > 0.75 * 80 * 2**30
    assert run_memory(large, 0, c, 10.0) == run_memory(large, 0, c, 0.0)
    assert most > run_memory(large, 0, c, 10.0).total


def test_inputs_gathered_while_a_pipeline_fills_are_needed():
    c, tokens = MemoryConstants(), 2 * 2048
    staged = nanotron(cluster=cluster("h100:16"), tensor=4, pipeline=4)
    more = run_memory(staged, 0, evolve(c, filling=c.filling + 1)).total - run_memory(staged).total
    # of four microbatches in flight all but the first and the last wait for their receivers
    assert more == pytest.approx(stage_layers(staged)[0] * tokens * MODEL.hidden * (4 - 2))
    two = nanotron(tensor=4, pipeline=2)
    assert run_memory(two, 0, evolve(c, filling=9.0)) == run_memory(two, 0, c)


def test_nothing_waits_for_a_stream_in_pipelines_that_stall():
    stalled = nanotron(cluster=cluster("h100:128"), tensor=32, pipeline=4)
    assert run_memory(stalled, 0, None, 10.0).communication == 0
    assert run_memory(evolve(stalled, tensor=8, data=4), 0, None, 10.0).communication > 0


def test_the_loss_of_the_microbatch_before_holds_logits():
    c = MemoryConstants()
    one = nanotron(global_batch=2)
    logits = 2 * 2048 * MODEL.vocab / 8
    assert run_memory(nanotron()).temporaries - run_memory(one).temporaries == c.held * logits
