import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_meta.operators.moves import Piece, Run, exchanges, pieces, reversal, rounds


@st.composite
def joins(draw):
    """Draw runs of some operands that follow each other, with gaps, in a result."""
    count = draw(st.integers(1, 6))
    sizes = tuple(count * draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 3))))
    runs, place = [], 0
    for _ in range(draw(st.integers(0, 4))):
        operand = draw(st.integers(0, len(sizes) - 1))
        start = draw(st.integers(0, sizes[operand]))
        length = draw(st.integers(0, sizes[operand] - start))
        place += draw(st.integers(0, 3))
        runs.append(Run(operand, start, length, place))
        place += length
    size = -(-(place + draw(st.integers(1, 3))) // count) * count
    return tuple(runs), sizes, size, count


@settings(max_examples=300, deadline=None)
@given(joins())
def test_pieces_bring_every_element_of_the_runs_to_its_place(case):
    runs, sizes, size, count = case
    operands = [100 * (k + 1) + np.arange(n) for k, n in enumerate(sizes)]
    wanted = np.zeros(size, int)
    for run in runs:
        wanted[run.target : run.target + run.length] = operands[run.operand][run.start :][
            : run.length
        ]
    held = [np.concatenate([np.split(x, count)[k] for x in operands]) for k in range(count)]
    found = np.zeros((count, size // count), int)
    for group in rounds(pieces(runs, sizes, size, count)):
        assert len({p.sender for p in group}) == len({p.receiver for p in group}) == len(group)
        assert len({p.sender == p.receiver for p in group}) == 1
        for p in group:
            found[p.receiver, p.target : p.target + p.length] = held[p.sender][p.start :][
                : p.length
            ]
    assert (found.ravel() == wanted).all()


def test_a_shift_sends_its_width_once():
    moved = pieces((Run(0, 0, 14, 2),), (16,), 16, 4)
    assert exchanges(moved, 4, 4) == [("collective-permute", 2)]


def test_half_of_a_dim_is_sent_in_two_rounds():
    moved = pieces((Run(0, 0, 8, 0),), (16,), 8, 4)
    assert rounds(moved)[1:] == (
        (Piece(0, 2, 2, 1, 0), Piece(1, 0, 2, 2, 0)),
        (Piece(1, 2, 2, 3, 0),),
    )


def test_two_joined_operands_are_sent_in_two_rounds_whatever_the_number_of_devices():
    for count in (4, 8, 16):
        size = 3 * count
        moved = pieces((Run(0, 0, size, 0), Run(1, 0, size, size)), (size,) * 2, 2 * size, count)
        assert exchanges(moved, 6, count) == [("collective-permute", 3)] * 2


def test_a_reversal_pairs_the_ends():
    assert exchanges(reversal(8, 2), 4, 2) == [("collective-permute", 4)]


@pytest.mark.parametrize("count", [32])
def test_pieces_for_very_many_rounds_are_gathered(count):
    moved = pieces((Run(0, 0, count, 0),), (count * count,), count, count)
    assert exchanges(moved, count, count) == [("all-gather", count * count)]
