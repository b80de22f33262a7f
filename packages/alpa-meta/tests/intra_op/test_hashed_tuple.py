"""Tuples as keys: equal to plain ones, hashed once."""

import copy

from alpa_meta.intra_op.hashed_tuple import HashedTuple


class Counted:
    """An entry that counts how often it is hashed."""

    def __init__(self):
        self.hashes = 0

    def __hash__(self):
        self.hashes += 1
        return 1


def test_entries_are_hashed_once():
    entry = Counted()
    one = HashedTuple([entry])
    known = {one: 1, (one, "more"): 2}
    assert known[one] == 1 and known[one, "more"] == 2 and entry.hashes == 1


def test_it_is_the_key_that_a_plain_tuple_is():
    one = HashedTuple("ab")
    known: dict[tuple[str, ...], int] = {one: 1}
    assert known["a", "b"] == 1 and one == ("a", "b") and one[1:] == ("b",)


def test_another_process_gets_a_plain_tuple_which_it_hashes_itself():
    one = HashedTuple("ab")
    assert type(copy.copy(one)) is tuple and copy.copy(one) == one
