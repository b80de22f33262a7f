"""Tuples of specs or strategies as keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T", covariant=True)


class HashedTuple(tuple[T, ...]):
    """A tuple that is hashed once, when it is made, and equal to any of the same entries.

    What follows from the specs or strategies of a node is remembered by them, and asked for far
    more often than there are different ones; to hash fifty specs takes longer than all else that is
    then done with them.
    """

    _hash: int

    def __new__(cls, of: Iterable[T]) -> HashedTuple[T]:
        """Return the tuple of these entries."""
        made = super().__new__(cls, of)
        made._hash = tuple.__hash__(made)
        return made

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[tuple[T, ...]], tuple[list[T]]]:
        return tuple, (list(self),)  # hashes of strings differ between processes
