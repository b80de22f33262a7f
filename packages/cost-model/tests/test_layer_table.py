import pytest

from cost_model import TransformerSpec
from cost_model.layer_table import measured_layer

OPT = TransformerSpec(hidden=1024, layers=24, heads=16, seq=2048, vocab=50272)


def layer_seconds(micro_batch):
    measured = measured_layer("gh200", OPT, 4, micro_batch)
    assert measured is not None
    return measured[0]


def test_measured_microbatches_are_returned_and_others_interpolated():
    eight, twelve, sixteen = map(layer_seconds, (8, 12, 16))
    assert eight == pytest.approx(9.15e-3, rel=0.01)
    assert eight < twelve < sixteen


def test_a_smaller_microbatch_never_takes_longer():
    times = [layer_seconds(size) for size in (1, 2, 4, 8, 16, 32)]
    assert times == sorted(times)


def test_beyond_the_largest_microbatch_time_grows_with_it():
    largest, twice = map(layer_seconds, (128, 256))
    assert twice == pytest.approx(2 * largest)


def test_shapes_and_devices_without_measurements_have_none():
    assert measured_layer("h100", OPT, 4, 8) is None
    assert measured_layer("gh200", OPT, 3, 8) is None
