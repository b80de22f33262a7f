import pytest

from cost_model import Sample, calibrate
from cost_model.layer_prediction import layer_seconds


def sample(name="layer-forward", hidden=4096, dtype="float32"):
    return Sample(name=name, seconds=1.0, dtype=dtype, shape=(1, 2048, hidden))


def test_a_backward_pass_costs_twice_its_forward(made_up_machine):
    profile = calibrate(made_up_machine())
    forward = layer_seconds(profile, sample())
    assert layer_seconds(profile, sample("layer-both")) == pytest.approx(3 * forward)


def test_a_large_layer_takes_about_its_flops(made_up_machine):
    profile = calibrate(made_up_machine())
    flops = 2 * 2048 * 12 * 4096**2 + 4 * 2048 * 2048 * 4096
    assert layer_seconds(profile, sample()) == pytest.approx(flops / 4e13, rel=0.6)  # tensorfloat32
    assert layer_seconds(profile, sample(dtype="bfloat16")) < layer_seconds(profile, sample()) / 1.5
