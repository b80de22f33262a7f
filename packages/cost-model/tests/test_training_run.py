import pytest
from attrs import evolve

from cost_model import TrainingRun, TransformerSpec, cluster
from cost_model.training_run import idle_stages, stage_layers, start_problem

MODEL = TransformerSpec(hidden=4096, layers=32, heads=32, seq=2048)


def run(devices=8, **more):
    settings = {"global_batch": 64, "micro_batch": 2, "tensor": devices}
    return TrainingRun(model=MODEL, cluster=cluster(f"a100-80gb:{devices}"), **settings | more)


def test_impossible_configurations_are_refused():
    with pytest.raises(ValueError, match="is 4, but cluster 'a100-80gb:8' has 8 devices"):
        run(8, tensor=4)
    with pytest.raises(ValueError, match="must be a multiple of data x micro_batch = 1 x 3"):
        run(micro_batch=3)
    with pytest.raises(ValueError, match="recompute"):
        run(recompute="sometimes")
    with pytest.raises(ValueError, match="stage_layers must divide 32 layers into 2 stages"):
        run(8, tensor=4, pipeline=2, stage_layers=(16, 8))
    with pytest.raises(ValueError, match="expert must divide the 8 devices of a stage"):
        run(8, expert=4)


def test_stages_are_cut_as_the_executor_cuts_them():
    staged = run(8, tensor=2, pipeline=4)
    assert stage_layers(staged) == (8.0, 8.0, 8.0, 8.0)
    wide = evolve(staged, model=evolve(MODEL, vocab=400_000), executor="nanotron")
    layers = stage_layers(wide)
    assert sum(layers) == 32 and layers[-1] < layers[0]
    assert stage_layers(evolve(staged, stage_layers=(7, 9, 9, 7))) == (7.0, 9.0, 9.0, 7.0)


def test_stages_that_stay_idle_are_counted():
    # 2 layers of cost 1 and a far heavier output matrix, which the first stages wait for
    small = TransformerSpec(hidden=512, layers=2, heads=8, seq=512, vocab=400_000, gated=True)
    wide = TrainingRun(
        model=small, cluster=cluster("h100:8"), global_batch=8, pipeline=8, executor="nanotron"
    )
    assert idle_stages(wide) > 0 == idle_stages(evolve(wide, executor="megatron"))
    assert "stay without a layer" in start_problem(wide)


def test_replicas_with_whole_gradients_of_a_shared_embedding_do_not_start():
    staged = run(16, tensor=4, pipeline=2, data=2, executor="nanotron")
    assert "share an embedding" in start_problem(staged)
    for other in (
        {"zero_stage": 1},
        {"executor": "megatron"},
        {"model": evolve(MODEL, tied=False)},
        {"pipeline": 1, "data": 4},
        {"cluster": cluster("a100-80gb:256"), "data": 32},
        {"global_batch": 4},
    ):
        assert start_problem(evolve(staged, **other)) == ""
