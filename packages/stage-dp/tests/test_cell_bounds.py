"""Bounds of layer ranges within memory: below every choice of rows, and whole layers count."""

import itertools
from collections import Counter

import numpy as np
import pytest

from stage_dp.cell_bounds import RowArrays, within_memory
from stage_dp.menu_table import Sequences


def rows_of(
    seconds, activation, transient, memory, state=None, step=None, split=None, delayed=None
):
    """Return the rows of one mesh: [classes, rows] each."""
    seconds = np.array(seconds, dtype=float)[None]
    nothing = np.where(np.isfinite(seconds), 0.0, np.inf)
    return RowArrays(
        seconds,
        nothing if step is None else np.array(step)[None],
        nothing if state is None else np.array(state)[None],
        np.array(activation, dtype=float)[None],
        np.array(transient, dtype=float)[None],
        nothing if split is None else np.array(split)[None],
        nothing if delayed is None else np.array(delayed)[None],
        np.array(activation, dtype=float)[None],
        np.zeros((1, seconds.shape[1], 3)),
        np.array([memory]),
        {},
        tuple(range(seconds.shape[1])),
        np.zeros((2, *seconds.shape[:2])),
    )


def bound_of(rows, classes, held, weight=0.0, delayed=0):
    """Return the bound of all of these layers with so many microbatches in flight."""
    sequences = Sequences(classes)
    layers = Counter(classes)
    found = within_memory(rows, sequences, weight, np.array([held]), layers, num_delayed=delayed)
    return found[sequences.number[0, len(classes)], 0, 0]


def test_layers_that_keep_little_are_a_whole_number():
    # One of three layers must be computed again: not the half that would do for the bytes.
    rows = rows_of([[1.0, 2.0]], [[1.0, 0.0]], [[0.0, 0.0]], 2.5)
    assert bound_of(rows, (0, 0, 0), held=1) == pytest.approx(4.0)


def test_a_layer_that_is_computed_again_takes_its_temporaries():
    # With one of them 0.6 less is left for the other two, which then do not fit either.
    rows = rows_of([[1.0, 2.0]], [[1.0, 0.0]], [[0.0, 0.6]], 2.5)
    assert bound_of(rows, (0, 0, 0), held=1) == pytest.approx(5.0)
    assert bound_of(rows_of([[1.0, 2.0]], [[1.0, 0.0]], [[0.0, 0.6]], 3.0), (0, 0, 0), 1) == 3.0


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_of_rows_that_fits_is_below_the_bound(seed):
    rng = np.random.default_rng(seed)
    shape = (2, int(rng.integers(2, 5)))
    seconds = rng.uniform(1, 3, shape)
    seconds[:, 1:][rng.random((2, shape[1] - 1)) < 0.2] = np.inf
    columns = {
        "activation": rng.choice([0.05, 0.1, 1.0, 2.0], shape),
        "transient": rng.uniform(0, 1, shape),
        "state": rng.uniform(0, 1, shape),
        "step": rng.uniform(0, 1, shape),
        "split": rng.uniform(0, 0.3, shape),
        "delayed": rng.uniform(0, 1, shape),
    }
    columns = {name: np.where(np.isfinite(seconds), x, np.inf) for name, x in columns.items()}
    classes = (1, 0, 0, 0, 0)[: int(rng.integers(2, 6))]
    held, weight = int(rng.integers(1, 4)), float(rng.choice([0.0, 0.5]))
    delayed = int(rng.integers(2))
    rows = rows_of(seconds, memory=rng.uniform(2, 12), **columns)
    best = np.inf
    for picks in itertools.product(range(shape[1]), repeat=len(classes)):
        at = (0, list(classes), list(picks))
        bytes = (rows.state[at] + held * rows.activation[at]).sum() + rows.transient[at].max()
        seconds = rows.seconds[at] + (weight * rows.step[at] if weight else 0.0)
        if delayed:
            bytes, seconds = bytes + rows.delayed[at].sum(), seconds + rows.split[at]
        if bytes <= rows.memory[0]:
            best = min(best, float(seconds.sum()))
    assert bound_of(rows, classes, held, weight, delayed) <= best * (1 + 1e-9)
