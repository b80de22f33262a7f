"""Keys of objects that have no hash."""

import weakref

import numpy as np

from alpa_meta.identity import Identity


def test_a_key_is_of_one_object_and_keeps_it():
    one, other = np.ones(2), np.ones(2)
    known = {Identity(one): "one"}
    assert known[Identity(one)] == "one" and Identity(other) not in known
    left = weakref.ref(one)
    del one
    assert left() is not None
    known.clear()
    assert left() is None


def test_objects_are_distinct_unless_one_is_there_twice():
    one, other = np.ones(2), np.ones(2)
    assert Identity.distinct([one, other]) and not Identity.distinct([one, other, one])
