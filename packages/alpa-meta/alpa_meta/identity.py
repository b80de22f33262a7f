"""Objects told apart by identity that cannot be keys themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


@final
class Identity:
    """A key of one object, which it keeps alive: no later object is taken for it.

    Only for objects of others that have no hash: leaves of a user's pytrees (jax and numpy arrays),
    literals of jaxprs, parameters of primitives. Variables and equations of jaxprs hash by
    identity and are keys themselves, as are our classes with `eq=False`.
    """

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        self._of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._of is other._of

    def __hash__(self) -> int:
        return id(self._of)

    @staticmethod
    def distinct(objects: Sequence[object]) -> bool:
        """Return whether no object is there twice: asked in every step, of all its leaves, for
        which keys take four to five times as long."""
        return len(set(map(id, objects))) == len(objects)
