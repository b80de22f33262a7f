"""Repeated blocks are found at the places where little crosses between them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_dp.repetition import Run, repeated_runs


def runs_of(text, live=None, work=None):
    live = np.ones(len(text) + 1) if live is None else np.asarray(live, dtype=float)
    work = np.ones(len(text)) if work is None else np.asarray(work, dtype=float)
    return repeated_runs(text, work, live)


def test_blocks_between_a_beginning_and_an_end():
    assert runs_of("XYabcabcabcZ") == (Run(2, 3, 3),)


def test_blocks_begin_where_least_is_live():
    # The stream of a, b, c repeats from any place; the cut before c has the least bytes.
    live = [9, 5, 1, 9, 5, 1, 9, 5, 1, 9]
    assert runs_of("abcabcabc", live=live) == (Run(2, 3, 2),)


def test_two_kinds_of_blocks_are_two_runs():
    assert runs_of("ababababcdecdecde") == (Run(0, 2, 4), Run(8, 3, 3))


def test_the_shortest_period_is_taken():
    assert runs_of("abababab") == (Run(0, 2, 4),)


def test_programs_without_repetition_have_no_runs():
    assert runs_of("abcdef") == ()
    assert runs_of("") == ()


def test_repetition_of_little_work_is_ignored():
    assert runs_of("abababX", work=[1e-6] * 6 + [1.0]) == ()


@settings(derandomize=True, max_examples=100, deadline=None)
@given(text=st.text("abc", max_size=24))
def test_runs_are_disjoint_and_do_repeat(text):
    runs = runs_of(text)
    for run in runs:
        block = text[run.start : run.start + run.period]
        assert text[run.start : run.stop] == block * run.count
        assert run.count >= 2
    assert all(a.stop <= b.start for a, b in zip(runs, runs[1:], strict=False))


@pytest.mark.parametrize("count", [2, 7])
def test_cuts_are_the_borders_of_blocks(count):
    assert list(Run(3, 4, count).cuts) == [3 + 4 * k for k in range(count + 1)]
