import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resharding import Box
from resharding import regions as module
from resharding.regions import buffer_of, read, readable, region_of


@st.composite
def boxes(draw):
    """Return a tile, and a box inside it."""
    tile: tuple[list[int], list[int]] = ([], [])
    box: tuple[list[int], list[int]] = ([], [])
    for _ in range(draw(st.integers(0, 3))):
        low, size = draw(st.integers(0, 3)), draw(st.integers(1, 6))
        start = draw(st.integers(low, low + size - 1))
        stop = draw(st.integers(start + 1, low + size))
        for pair, ends in ((tile, (low, low + size)), (box, (start, stop))):
            pair[0].append(ends[0])
            pair[1].append(ends[1])
    return Box(*map(tuple, tile)), Box(*map(tuple, box))


def memory_of(tile, width, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, tile.size * width, dtype=np.uint8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(boxes(), st.sampled_from([1, 2, 4, 8, 16]), st.data())
def test_runs_are_the_bytes_of_the_box_in_row_major_order(drawn, width, data):
    tile, box = drawn
    region = region_of(memory_of(tile, width), tile, box, width)
    expected = np.ascontiguousarray(region.view).tobytes()
    begin = data.draw(st.integers(0, region.nbytes))
    end = data.draw(st.integers(begin, region.nbytes))
    assert b"".join(region.views(begin, end)) == expected[begin:end]


@pytest.mark.skipif(
    not readable(os.getpid(), (probe := np.arange(8, dtype=np.uint8)).ctypes.data, probe.tobytes()),
    reason="the operating system does not let processes read each other's memory",
)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(boxes(), boxes(), st.sampled_from([1, 4, 16]), st.sampled_from([1, 7, 1 << 20]), st.data())
def test_reads_between_tiles_of_any_shape_fill_the_box(drawn, other, width, most, data):
    tile, box = drawn
    source = region_of(memory_of(tile, width), tile, box, width)
    target_tile = Box(tuple(max(0, a - 1) for a in box.start), tuple(b + 2 for b in box.stop))
    for where in (box, target_tile):
        memory = np.zeros(where.size * width, np.uint8)
        target = region_of(memory, where, box, width)
        old = module._MOST_AT_ONCE
        module._MOST_AT_ONCE = most
        try:
            cut = data.draw(st.integers(0, target.nbytes))
            for begin, end in ((0, cut), (cut, target.nbytes)):
                read(os.getpid(), source.memory.ctypes.data, source.runs, target, begin, end)
        finally:
            module._MOST_AT_ONCE = old
        assert target.view.tobytes() == source.view.tobytes()
        assert np.count_nonzero(memory) <= target.nbytes  # and nothing beside it


def test_memory_that_is_not_there_is_not_readable():
    assert not readable(os.getpid(), 16, b"x" * 8)
    there = np.arange(8, dtype=np.uint8)
    assert not readable(os.getpid(), there.ctypes.data, b"x" * 8)


def test_a_buffer_holds_a_box_and_nothing_else():
    box = Box((3, 1), (5, 4))
    region = buffer_of(np.arange(24, dtype=np.uint8), box, 4)
    assert region.runs.outer == () and region.nbytes == 24 and region.view.shape == (2, 3)
