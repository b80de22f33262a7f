"""Hosts read the rows of a batch that their devices need, and those of the next while it runs."""

import jax
import numpy as np
import pytest

from mesh_runtime import HostBatches
from mesh_runtime.host_batches import HostRead, RowReader

SHAPES = {"x": jax.ShapeDtypeStruct((8, 4), np.int32), "rate": jax.ShapeDtypeStruct((), np.float32)}


class Rows:
    """Reads rows that say their step and number, and keeps what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, step, start, stop):
        self.asked.append((step, start, stop))
        rows = np.arange(start, stop, dtype=np.int32)[:, None] * 10 + np.arange(4, dtype=np.int32)
        return {"x": rows + 1000 * step, "rate": np.float32(step)}


def test_a_batch_is_read_when_it_is_asked_for_once_and_the_next_one_ahead():
    read = Rows()
    batches = HostBatches(read, SHAPES)
    batch = batches[3]
    assert batch["x"].shape == (8, 4) and batch["x"].dtype == np.int32 and not read.asked
    np.testing.assert_array_equal(np.asarray(batch["x"][2:4])[:, 0], [3020, 3030])
    assert np.asarray(batch["rate"]) == 3
    np.asarray(batch["x"])
    np.asarray(batches[4]["x"])
    assert sorted(read.asked) == [(3, 0, 0), (3, 0, 8), (4, 0, 0), (4, 0, 8), (5, 0, 8)]


def test_a_host_reads_the_rows_of_its_boxes_by_ranges():
    read = Rows()
    reader = RowReader(read, [SHAPES["rate"], SHAPES["x"]])
    reads = {
        "x@0": HostRead(0, 1, 1, (0, 4)),
        "x@1": HostRead(0, 1, 1, (4, 8)),
        "rate": HostRead(0, 1, 0, (0, 8)),
    }
    lower = [((2, 4), (0, 2)), ((2, 4), (2, 4))]  # the second half of each microbatch, cut in two
    found = reader.shares(reads, {"x@0": lower, "x@1": lower, "rate": [()]})
    tiles = dict(found["x@1"].tiles)
    np.testing.assert_array_equal(tiles[(2, 4), (2, 4)], [[1062, 1063], [1072, 1073]])
    assert found["x@0"].shape == (4, 4) and dict(found["rate"].tiles)[()] == 1
    assert {one for one in read.asked if one[0] == 1} == {(1, 0, 0), (1, 2, 4), (1, 6, 8)}


def test_rows_of_another_shape_are_refused_with_the_leaf():
    batches = HostBatches(
        lambda step, start, stop: {"x": np.zeros((1, 4), np.int32)}, {"x": SHAPES["x"]}
    )
    with pytest.raises(ValueError, match=r"read\(2, 0, 8\) gave int32\[1, 4\] for leaf 0"):
        np.asarray(batches[2]["x"])


def test_leaves_of_different_numbers_of_rows_are_refused():
    with pytest.raises(ValueError, match="equally many rows"):
        HostBatches(Rows(), [SHAPES["x"], jax.ShapeDtypeStruct((7,), np.int32)])


def test_what_is_read_whole_is_read_by_microbatches():
    parts = HostRead(0, 3, 1, (2, 8), count=3).parts("x")
    assert parts == {f"x@{k}": HostRead(0, 3, 1, (2 + 2 * k, 4 + 2 * k)) for k in range(3)}
    assert HostRead(0, 3, 0, (0, 8)).parts("rate") == {"rate": HostRead(0, 3, 0, (0, 8))}
