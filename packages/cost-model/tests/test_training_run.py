import pytest
from attrs import evolve

from cost_model import TrainingRun, TransformerSpec, cluster
from cost_model.training_run import StepConstants, predict_terms

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


def test_impossible_configurations_are_refused():
    with pytest.raises(ValueError, match="is 4, but cluster 'a100-80gb:8' has 8 devices"):
        run(8, tensor=4)
    with pytest.raises(ValueError, match="must be a multiple of data x micro_batch = 1 x 3"):
        run(micro_batch=3)
    with pytest.raises(ValueError, match="recompute"):
        run(recompute="sometimes")
