"""One row per layer against brute force over all choices."""

import itertools

import numpy as np
import pytest

from stage_dp.layer_choice import LayerRows, choose_rows


def random_rows(rng):
    """Return up to five layers of two kinds, so that some are alike."""
    kinds = []
    for _ in range(2):
        size = int(rng.integers(1, 4))
        kinds.append((rng.uniform(1, 5, size), rng.uniform(0, 6, size)))
    change = {
        pair: rng.choice([0.0, 1.0], (len(kinds[pair[0]][0]), len(kinds[pair[1]][0])))
        * rng.uniform(0, 1)
        for pair in itertools.product(range(2), repeat=2)
    }
    chosen = rng.integers(2, size=rng.integers(1, 6))
    return LayerRows(
        tuple(kinds[k][0] for k in chosen),
        tuple(kinds[k][1] for k in chosen),
        (np.zeros((0, 0)), *(change[pair] for pair in itertools.pairwise(chosen))),
        tuple(np.arange(len(kinds[k][0])) for k in chosen),
    )


def figures(rows, choice):
    seconds = sum(own[pick] for own, pick in zip(rows.seconds, choice, strict=True))
    for k in range(1, len(choice)):
        seconds += rows.transitions[k][choice[k - 1], choice[k]]
    return seconds, sum(own[pick] for own, pick in zip(rows.bytes, choice, strict=True))


@pytest.mark.sample(seed=50)
@pytest.mark.parametrize("seed", range(150))
def test_rows_are_the_best_of_all_that_fit(seed):
    rng = np.random.default_rng(seed)
    rows = random_rows(rng)
    memory = len(rows.seconds) * rng.uniform(1, 6)
    every = itertools.product(*(range(len(own)) for own in rows.seconds))
    known = [figures(rows, choice) for choice in every]
    best = min((seconds for seconds, size in known if size <= memory), default=None)
    found = choose_rows(rows, memory)
    if best is None:
        assert found is None
        return
    assert found is not None
    choice, seconds, bound = found
    assert seconds == pytest.approx(best)
    assert figures(rows, choice)[0] == pytest.approx(seconds)
    assert figures(rows, choice)[1] <= memory * (1 + 1e-9)
    assert bound <= best * (1 + 1e-9)


def fast_and_lean(change):
    """Return ten equal layers: fast takes 1 s and 4 bytes, lean 2 s and 1 byte."""
    return LayerRows(
        (np.array([1.0, 2.0]),) * 10,
        (np.array([4.0, 1.0]),) * 10,
        (np.array([[0.0, change], [change, 0.0]]),) * 10,
        (np.arange(2),) * 10,
    )


def test_equal_layers_mix_two_rows_to_fill_the_memory():
    # In 25 bytes five of ten layers can be fast.
    found = choose_rows(fast_and_lean(0.0), 25.0)
    assert found is not None
    choice, seconds, _ = found
    assert (choice.count(0), seconds) == (5, 15.0)


def test_a_transition_between_rows_is_paid_once_where_layers_are_alike():
    found = choose_rows(fast_and_lean(0.5), 25.0)
    assert found is not None
    choice, seconds, _ = found
    assert seconds == 15.5
    assert len(list(itertools.groupby(choice))) == 2
