"""Elements made of several tokens are in slices where those tokens are ready."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alpa_meta.token_slices.cuts import Cutting, cuts_of, owners_of
from alpa_meta.token_slices.places import ROW, Place, Slices

NUM_SLICES = 4
owners = st.lists(st.integers(-1, NUM_SLICES - 1), min_size=1, max_size=20)
lengths = st.lists(st.integers(1, 6), min_size=2, max_size=5).map(tuple)


@given(owners, st.booleans())
def test_no_element_is_made_before_what_it_is_made_of(owners, forward):
    cuts = cuts_of(np.array(owners), forward, NUM_SLICES)
    made = owners_of(cuts)
    assert len(made) == len(owners) and (np.diff(made) >= 0).all()
    for own, slice_number in zip(owners, made, strict=True):
        if own >= 0:
            assert slice_number >= own if forward else slice_number <= own


@given(lengths, st.integers(-3, 3), st.booleans())
def test_a_shift_keeps_the_tokens_slices_where_it_goes_the_way_of_the_sweep(lengths, by, forward):
    slices = Slices(lengths)
    shifted = np.full(slices.tokens, -1)
    token_owners = owners_of(slices.cuts)
    for element in range(slices.tokens):
        if 0 <= element - by < slices.tokens:
            shifted[element] = token_owners[element - by]
    cutting = Cutting(slices, forward)
    place = cutting.settled(Place(ROW, cuts=cuts_of(shifted, forward, slices.count)))
    if by == 0 or (by > 0) == forward:
        assert not place.cuts
    joined = cutting.joined(place, Place(ROW))
    assert cutting.is_ready(place, joined) and cutting.is_ready(Place(ROW), joined)
