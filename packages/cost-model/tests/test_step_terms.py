import pytest
from attrs import evolve

from alpa_interchange.cluster import ClusterSpec
from cost_model import TrainingRun, TransformerSpec, cluster
from cost_model.step_constants import StepConstants
from cost_model.step_terms import predict_terms, stall_seconds, stalls
from cost_model.training_run import StagePlacement, stage_layers

MODEL = TransformerSpec(hidden=4096, layers=32, heads=32, seq=2048)
C = StepConstants()


def run(devices=8, **more):
    settings = {"global_batch": 64, "micro_batch": 2, "tensor": devices}
    return TrainingRun(model=MODEL, cluster=cluster(f"a100-80gb:{devices}"), **settings | more)


def step(configuration, constants=C):
    return sum(predict_terms(configuration, constants).values())


def test_twice_the_batch_takes_twice_the_microbatches():
    small, large = predict_terms(run(), C), predict_terms(run(global_batch=128), C)
    for name in ("compute", "tensor", "launch", "head"):
        assert large[name] == pytest.approx(2 * small[name])
    assert large["optimizer"] == small["optimizer"]


def test_recomputation_costs_between_nothing_and_a_third():
    none, selective, full = (
        predict_terms(run(recompute=kind), C)["compute"] for kind in ("none", "selective", "full")
    )
    assert none < selective < full < 1.4 * none


def test_the_bubble_is_the_idle_time_of_stages_less_one():
    staged = run(16, tensor=1, pipeline=16, global_batch=32, micro_batch=1)
    terms = predict_terms(staged, evolve(C, head=1e-9, embedding=1e-12, microbatch=1e-9))
    busy = terms["compute"] + terms["launch"]
    assert terms["bubble"] == pytest.approx(busy * 15 / 32, rel=0.05)
    interleaved = predict_terms(evolve(staged, chunks=2), C)["bubble"]
    assert interleaved == pytest.approx(predict_terms(staged, C)["bubble"] / 2)


def test_small_kernels_wait_for_their_launches():
    tiny = TransformerSpec(hidden=256, layers=8, heads=4, seq=128)
    alone = TrainingRun(model=tiny, cluster=cluster("a100-80gb:1"), global_batch=1)
    terms = predict_terms(alone, C)
    assert terms["launch"] > 5 * terms["compute"]
    assert predict_terms(run(micro_batch=16), C)["launch"] < 0.01 * step(run(micro_batch=16))


def test_tensor_parallelism_across_hosts_is_slow():
    inside = run(16, tensor=8, data=2)
    across = run(16, tensor=16)
    assert predict_terms(across, C)["tensor"] > 2 * predict_terms(inside, C)["tensor"]


def test_gradients_are_reduced_only_between_replicas():
    assert predict_terms(run(), C)["gradients"] == 0
    few = predict_terms(run(16, tensor=8, data=2), C)["gradients"]
    assert 0 < few < predict_terms(run(16, tensor=1, data=16), C)["gradients"]


def test_context_parallelism_adds_a_ring_and_divides_the_tokens():
    whole = run(8, tensor=4, data=2)
    ring = run(8, tensor=4, context=2)
    assert predict_terms(ring, C)["tensor"] > 0
    per_sequence = predict_terms(ring, C)["compute"] / ring.num_microbatches
    assert per_sequence < predict_terms(whole, C)["compute"] / whole.num_microbatches


def test_stages_on_unlike_devices_wait_for_the_slowest():
    groups = tuple(cluster(f"{name}:1x4").host_groups[0] for name in ("a100-40gb", "v100-16gb"))
    small = TransformerSpec(hidden=2048, layers=8, heads=16, seq=1024)

    def staged(first, second):
        return TrainingRun(
            model=small, cluster=ClusterSpec(name="both", host_groups=groups), global_batch=32,
            micro_batch=2, tensor=4, pipeline=2,
            placements=(
                StagePlacement(layers=first, replicas=((0, 4),)),
                StagePlacement(layers=second, replicas=((1, 4),)),
            ),
        )  # fmt: skip

    assert step(staged(6, 2)) < step(staged(4, 4)) < step(staged(2, 6))


def test_messages_between_hosts_delay_the_collectives_of_stages():
    slow = evolve(C, launch_staged=5e-3)
    staged = run(16, tensor=4, pipeline=4, global_batch=32)
    assert step(staged, slow) > step(staged) + 0.01
    inside = run(8, tensor=4, pipeline=2, global_batch=32)
    assert step(inside, slow) == step(inside)


def test_gathered_parameters_cost_where_kernels_do_not_hide_them():
    held = run(16, tensor=1, data=16, micro_batch=1, global_batch=16, executor="fsdp")
    cut = evolve(held, zero_stage=3)
    assert predict_terms(held, C)["tensor"] == 0 < predict_terms(cut, C)["tensor"]
    assert predict_terms(cut, C)["gradients"] == 0


def test_experts_send_their_tokens_over_the_devices_they_are_cut_over():
    sparse = evolve(MODEL, experts=8, experts_per_token=2, expert_width=2048)
    whole = evolve(run(8, tensor=1, data=8), model=sparse)
    cut = evolve(whole, expert=8)
    assert predict_terms(whole, C)["tensor"] == 0 < predict_terms(cut, C)["tensor"]


def test_layers_that_were_measured_are_taken_from_the_table():
    opt = TransformerSpec(hidden=1024, layers=24, heads=16, seq=2048, vocab=50272)
    measured = TrainingRun(
        model=opt, cluster=cluster("gh200:4"), global_batch=8, micro_batch=8, tensor=4,
        executor="sailor",
    )  # fmt: skip
    # 2.68 + 6.47 ms of each layer (eth-easl/sailor)
    assert predict_terms(measured, C)["compute"] == pytest.approx(24 * 9.15e-3, rel=0.01)


def test_collectives_with_a_stream_of_their_own_hide_behind_large_products():
    slow = evolve(C, tensor_bandwidth=0.5, tensor_latency=1e-9)
    plain = run(8, micro_batch=8, sequence_parallel=True, executor="megatron")
    beside = evolve(plain, executor="nanotron")
    whole, exposed = (predict_terms(one, slow)["tensor"] for one in (plain, beside))
    hidden = predict_terms(beside, evolve(slow, tensor_exposed=1e-9))["tensor"]
    assert hidden < 0.1 * whole
    assert exposed == pytest.approx(hidden + slow.tensor_exposed * (whole - hidden), rel=0.05)


def test_the_loss_is_in_the_stage_that_the_output_matrix_leaves_over():
    # 16 layers of cost 1 and an output matrix of 4: seven stages are filled, the eighth has none
    wide = TransformerSpec(
        hidden=2048, layers=16, heads=32, seq=4096, feedforward=8192, gated=True, vocab=131072
    )
    staged = TrainingRun(
        model=wide, cluster=cluster("h100:8"), global_batch=64, pipeline=8, executor="nanotron",
        fused_attention=True, dtype="bfloat16",
    )  # fmt: skip
    assert len(stage_layers(staged)) == 7
    without = step(staged, evolve(C, loss=1e-9))
    assert step(staged, evolve(C, loss=3.0)) == pytest.approx(without, rel=0.02)


def test_a_network_that_stalls_delays_every_microbatch_of_stages_on_several_hosts():
    c = evolve(C, stall=0.5)
    two, four = (run(16, tensor=16 // p, pipeline=p, global_batch=32) for p in (2, 4))
    assert stall_seconds(two, c) == 0.5 * (16 + 1 / 2)
    assert stall_seconds(four, c) == 2 * 0.5 * (16 + 3 / 2)
    assert stall_seconds(run(8, tensor=4, pipeline=2), c) == stall_seconds(two, C) == 0
    assert step(two, c) == step(two)
    many = run(512, tensor=8, pipeline=2, data=32)
    assert step(many, c) == pytest.approx(step(many) + stall_seconds(many, c))
    wide = run(64, tensor=32, pipeline=2)
    assert stalls(wide) and not stalls(run(32, tensor=16, pipeline=2))
    assert step(wide, c) == pytest.approx(step(wide) + stall_seconds(wide, c))


def test_kernels_made_for_experts_are_quicker_in_block_scaled_eight_bits_only():
    sparse = evolve(MODEL, experts=8, experts_per_token=2, expert_width=2048)
    before = TrainingRun(
        model=sparse, cluster=cluster("b200:8"), global_batch=64, data=8, expert=8,
        executor="megatron-bridge", dtype="mxfp8", fused_attention=True,
    )  # fmt: skip
    after = evolve(before, executor="megatron-bridge-2606")
    half = evolve(C, fused_experts=0.5)
    layers = [predict_terms(one, half)["compute"] for one in (before, after)]
    assert layers[1] == pytest.approx(layers[0] / 2)
    same = evolve(after, dtype="bfloat16")
    assert step(same, half) == step(same)


def test_parts_of_the_hidden_state_are_sent_where_the_next_stage_gathers_them():
    slow = evolve(C, pipeline_latency=1e-9)
    whole = run(16, tensor=8, pipeline=2, global_batch=32, executor="megatron")
    parts = evolve(whole, executor="megatron-deepspeed")
    sent = [predict_terms(one, slow)["pipeline"] for one in (whole, parts)]
    assert sent[0] == pytest.approx(8 * sent[1], rel=1e-3)


def test_products_of_experts_with_few_rows_run_at_less_of_the_rate():
    sparse = evolve(MODEL, experts=8, experts_per_token=2, expert_width=2048)
    one = TrainingRun(
        model=sparse, cluster=cluster("b200:8"), global_batch=64, data=8, expert=8,
        executor="megatron", fused_attention=True,
    )  # fmt: skip

    def added(given, rows):
        c = evolve(C, grouped_rows=float(rows))
        return predict_terms(given, c)["compute"] - predict_terms(given, C)["compute"]

    # 2048 tokens x 2 experts each, of 8 devices, over 8 experts of which a device has one
    alone = added(one, 4096)
    assert added(one, 2048) == pytest.approx(alone / 2)
    # larger products fill their last wave better, too
    assert added(evolve(one, micro_batch=2), 4096) == pytest.approx(alone / 2, rel=0.1)
    assert added(evolve(one, model=MODEL, expert=1), 4096) == 0
