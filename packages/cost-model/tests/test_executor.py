import pytest

from cost_model.executor import EXECUTORS, stages_by_cost


def test_stages_by_cost_give_the_output_matrix_a_stage_of_its_own():
    # 16 layers of cost 1 and an output matrix of cost 4, over 4 stages of 5 each: a stage is closed
    # by the block that takes the sum above its share
    places = stages_by_cost([1.0] * 16 + [4.0], 4)
    assert [places.count(stage) for stage in range(4)] == [6, 5, 5, 1]


def test_the_last_stages_may_stay_empty():
    assert max(stages_by_cost([1.0, 1.0, 10.0], 4)) < 3


@pytest.mark.parametrize("name", sorted(EXECUTORS))
def test_every_executor_is_described_by_a_fitted_one(name):
    assert EXECUTORS[name].fitted_as in EXECUTORS
