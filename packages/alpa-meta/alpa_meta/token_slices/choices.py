"""Which of two dims of tokens holds the keys, and whether slices may recompute all tokens: tried,
until nothing is refused."""

from __future__ import annotations

from collections.abc import Sequence

from alpa_meta.compat import JaxprEqn, source_line


class Refusal(Exception):
    """An equation that cannot run in slices; `chosen`: after choices that may be wrong."""

    def __init__(self, reason: str, chosen: bool) -> None:
        super().__init__(reason)
        self.reason, self.chosen = reason, chosen


def place_of(eqn: JaxprEqn) -> str:
    """Return the operator of an equation, and the user's line that it comes from."""
    line = source_line(eqn)
    return f"{eqn.primitive.name} at {line}" if line else str(eqn.primitive.name)


class Choices:
    """Which of two dims holds the keys, for every operator that meets two: tried in turn.

    `recomputes`: which values of all tokens each slice of the backward pass may recompute: none,
    those "refused" otherwise, or "all" that it recomputes.
    """

    def __init__(self, recomputes: str = "") -> None:
        self.recomputes = recomputes
        self.script: list[list[object]] = []  # [which, whether both were tried, kind of operator]
        self.position = 0
        self.chunk = 0  # what some operator wants slices to be multiples of, in tokens

    def choose(self, names: Sequence[str], kind: object) -> str:
        """Return the name of the keys; operators of one kind are first taken to be alike."""
        if self.position == len(self.script):
            alike = [which for which, _, other in self.script if other == kind]
            self.script.append([alike[-1] if alike else 1, False, kind])
        which = self.script[self.position][0]
        self.position += 1
        assert isinstance(which, int)
        return names[which]

    def turn_last(self) -> bool:
        """Turn the last choice made that was not turned before; return False if there is none."""
        del self.script[self.position :]
        while self.script and self.script[-1][1]:
            self.script.pop()
        if not self.script:
            return False
        which = self.script[-1][0]
        assert isinstance(which, int)
        self.script[-1][:2] = [1 - which, True]
        return True
