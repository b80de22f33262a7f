"""Step times of many interleaved pipelines, beside the longest path of each."""

import numpy as np
import pytest

from stage_dp.interleaved_time import estimated_seconds, interleaved_schedule, interleaved_seconds
from stage_dp.pipeline_time import pipeline_time


def pipelines(num_meshes, chunks, rng, size=7):
    """Return random seconds of some pipelines."""
    num = num_meshes * chunks
    work = [rng.random((size, num)), 2 * rng.random((size, num))]
    return [*work, rng.choice([0.0, 0.1, 2.0], (size, num - 1)), rng.random((size, num_meshes))]


@pytest.mark.parametrize(
    ("num_meshes", "chunks", "count"),
    [(2, 2, 1), (2, 3, 4), (3, 2, 7), (4, 2, 16), (5, 3, 11), (8, 2, 24), (1, 3, 4)],
)
def test_every_pipeline_takes_what_its_longest_path_does(num_meshes, chunks, count, monkeypatch):
    figures = pipelines(num_meshes, chunks, np.random.default_rng(count))
    schedule = interleaved_schedule(num_meshes * chunks, count, num_meshes)
    expected = [
        pipeline_time(schedule, *(one[k] for one in figures)).step_seconds for k in range(7)
    ]
    found = interleaved_seconds(num_meshes, count, *figures)
    assert found == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr("stage_dp.interleaved_time.MOST_BYTES", 1.0)  # one pipeline at a time
    assert interleaved_seconds(num_meshes, count, *figures) == pytest.approx(found, rel=1e-12)


def test_many_microbatches_of_even_stages_are_estimated_exactly():
    rng = np.random.default_rng(0)
    forward = np.repeat(rng.random((3, 1)), 8, axis=1)
    figures = forward, 2 * forward, np.zeros((3, 7)), np.zeros((3, 4))
    exact = interleaved_seconds(4, 64, *figures)
    assert estimated_seconds(4, 64, *figures) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_estimate_is_near(seed):
    figures = pipelines(4, 2, np.random.default_rng(seed))
    exact = interleaved_seconds(4, 48, *figures)
    assert estimated_seconds(4, 48, *figures) == pytest.approx(exact, rel=0.05)
