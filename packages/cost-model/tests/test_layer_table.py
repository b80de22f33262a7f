import gzip

import pytest

from cost_model import TransformerSpec
from cost_model.layer_table import measured_layer, read_layers

OPT = TransformerSpec(hidden=1024, layers=24, heads=16, seq=2048, vocab=50272)
# eth-easl/sailor (MIT), OPT-350 on GH200, tensor parallelism 4
ROWS = """\
model,gpu,micro_batch,tp,layer,forward_seconds,backward_seconds,update_seconds
OPT-350,GH-96,8,4,0,0.00092,0.0,0.0
OPT-350,GH-96,8,4,1,0.00268,0.00647,0.00048
OPT-350,GH-96,8,4,2,0.00269,0.00647,0.00048
OPT-350,GH-96,8,4,3,0.00401,0.00594,0.0
GPT-Neo-2.7,GH-96,8,4,0,0.00092,0.0,0.0
"""


def test_tables_give_the_median_layer_and_both_ends(tmp_path):
    path = tmp_path / "layers.csv.gz"
    path.write_bytes(gzip.compress(ROWS.encode()))
    (time,) = read_layers(path).times  # the source repeats OPT-350 as GPT-Neo there: left out
    assert (time.device, time.hidden, time.tensor, time.micro_batch) == ("gh200", 1024, 4, 8)
    assert time.seconds == pytest.approx(9.155e-3, abs=1e-6)
    assert (time.first, time.last) == pytest.approx((0.92e-3, 9.95e-3), abs=1e-6)


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
