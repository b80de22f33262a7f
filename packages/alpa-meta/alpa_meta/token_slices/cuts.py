"""Which elements of a dim each slice holds, where they are made of several tokens, or moved.

An element is of the slice that has, in the order of the sweep, the last of the tokens that it is
made of: in the forward sweep the latest, in the backward sweep the earliest. A dim is cut where
that changes; elements that would be out of order wait for a later slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from alpa_meta.token_slices.places import ROW, Place, Slices

Owners = NDArray[np.int64]
"""The slice of each element of a dim; -1 of elements that every slice can make."""


def owners_of(cuts: Sequence[int]) -> Owners:
    """Return the slice of each element of a dim that is cut."""
    return np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))


def cuts_of(owners: Owners, forward: bool, count: int) -> tuple[int, ...]:
    """Return where a dim is cut into `count` slices whose elements are ready in those slices."""
    if forward:
        ordered = np.maximum.accumulate(np.maximum(owners, 0))
    else:
        known = np.where(owners < 0, count - 1, owners)
        ordered = np.minimum.accumulate(known[::-1])[::-1]
    return tuple(np.searchsorted(ordered, range(count)).tolist()) + (len(owners),)


@frozen
class Cutting:
    """How the cuts of operands are joined in one sweep; `free` are those of an earlier sweep, whose
    elements are all there."""

    slices: Slices
    forward: bool
    free: tuple[bool, ...] = ()

    def joined(self, one: Place, other: Place) -> Place:
        """Return the place of elements made of those at both places."""
        pairs = zip(self.slices.cuts_of(one), self.slices.cuts_of(other), strict=True)
        later = min if self.forward else max
        return self.settled(evolve(one, cuts=tuple(later(pair) for pair in pairs)))

    def settled(self, place: Place) -> Place:
        """Return a place without cuts of its own if its elements are ready where their tokens
        are."""
        own = self.slices.cuts
        if place.cuts and place.cuts[-1] == own[-1] and self.is_ready(place, Place(ROW)):
            return evolve(place, cuts=())
        return place

    def is_ready(self, have: Place, want: Place) -> bool:
        """Return whether each slice can hold the elements of `want`, made by those of `have`."""
        pairs = zip(self.slices.cuts_of(have), self.slices.cuts_of(want), strict=True)
        return all(a >= b if self.forward else a <= b for a, b in pairs)
