"""Where the tokens lie in the dims of a value, and what a slice holds of them.

A dim may hold the tokens behind `outer` blocks and with `inner` elements to each: [batch x tokens]
has outer = batch. Of slice i, whose tokens are [start, stop), such a dim holds

    row    the tokens of the slice, [start, stop)
    key    those and all before them, [0, stop): what its rows may look back on

A dim made of some of the tokens (every second one, those of an associative scan's tree) has no
token for each element: its `cuts` say which of its elements each slice holds (`moves`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from attrs import evolve, frozen

from alpa_interchange import ShardingRule

ROW, KEY = "row", "key"
BLOCK = "block"  # the rows of one block of a loop over blocks


@frozen
class Place:
    """The tokens in a dim, as rows or as keys.

    `cuts`: where the slices begin in a dim whose elements are no tokens, and how many it has.
    `after`: how many more elements stand behind the keys of all tokens, which every slice has.
    """

    kind: str
    outer: int = 1
    inner: int = 1
    cuts: tuple[int, ...] = ()
    after: int = 0


Layout = tuple[Place | None, ...]
"""The place of the tokens in each dim of a value; a dim without is whole."""


def whole(rank: int) -> Layout:
    """Return the layout of a value that every slice holds whole."""
    return (None,) * rank


def kinds(layout: Layout) -> set[str]:
    """Return which of rows and keys a layout holds."""
    return {place.kind for place in layout if place is not None}


@frozen
class Slices:
    """The lengths of the slices, in tokens, in order."""

    lengths: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """The tokens of a sequence."""
        return sum(self.lengths)

    def span(self, kind: str, number: int) -> tuple[int, int]:
        """Return the tokens [start, stop) that slice `number` holds as rows or as keys."""
        return self.held(Place(kind), number)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where the slices begin, and where the last one stops."""
        return (0, *itertools.accumulate(self.lengths))

    def of_multiples(self, chunk: int) -> Slices | None:
        """Return slices of about these lengths that are multiples of `chunk` tokens, as many as
        there may be; None if that is one."""
        chunks, rest = divmod(self.tokens, chunk)
        count = min(self.count, chunks)
        if rest or count < 2:
            return None
        ends = [round(end / chunk) for end in self.cuts[1:count]]
        cuts = [0]
        for k, end in enumerate(ends):
            cuts.append(min(max(end, cuts[-1] + 1), chunks - (count - 1 - k)))
        pairs = itertools.pairwise([*cuts, chunks])
        return Slices(tuple((stop - start) * chunk for start, stop in pairs))

    def cuts_of(self, place: Place) -> tuple[int, ...]:
        """Return where the slices begin among what has a place, and where the last one stops."""
        return place.cuts or self.cuts

    def settled(self, place: Place) -> Place:
        """Return a place without cuts of its own if its elements are tokens."""
        if place.cuts and tuple(cut * place.inner for cut in place.cuts) == self.cuts:
            return evolve(place, inner=1, cuts=())
        return place

    def held(self, place: Place, number: int) -> tuple[int, int]:
        """Return the elements [start, stop) that slice `number` holds at a place."""
        start, stop = self.cuts_of(place)[number : number + 2]
        return (start if place.kind == ROW else 0), stop

    def shape(self, shape: Sequence[int], layout: Layout, number: int) -> tuple[int, ...]:
        """Return the shape that slice `number` holds of a value of this shape."""
        held = []
        for size, place in zip(shape, layout, strict=True):
            if place is not None:
                start, stop = self.held(place, number)
                size = place.outer * (stop - start) * place.inner + place.after
            held.append(size)
        return tuple(held)


@frozen
class SliceRequest:
    """What a user asks for: the lengths of the slices, or how many there are (0: none)."""

    lengths: tuple[int, ...] = ()
    count: int = 0

    def __bool__(self) -> bool:
        return bool(self.lengths) or self.count > 1

    def candidates(self, sizes: Sequence[int]) -> list[Slices]:
        """Return the slices to try, given the second dims of the batch's arrays: inputs and targets
        may be one array with a token more."""
        if self.lengths:
            return (
                [Slices(self.lengths)]
                if {sum(self.lengths), sum(self.lengths) + 1} & {*sizes}
                else []
            )
        tried = dict.fromkeys(size - less for less in (0, 1) for size in sorted({*sizes}))
        return [self._evenly(tokens) for tokens in tried if tokens >= self.count]

    def _evenly(self, tokens: int) -> Slices:
        each, rest = divmod(tokens, self.count)
        return Slices(tuple(each + (k < rest) for k in range(self.count)))


class StraddlingError(Exception):
    """The tokens of a dim are cut by an operator; `reason` reads on after its line and name. If it
    cuts them into chunks that slices do not, `chunk` is their tokens."""

    def __init__(
        self, reason: str = "cuts, joins or reorders the dim of tokens", chunk: int = 0
    ) -> None:
        super().__init__(reason)
        self.reason, self.chunk = reason, chunk


def factor_place(
    rule: ShardingRule, dim: Sequence[str], place: Place, slices: Slices
) -> tuple[str, Place]:
    """Return the factor of a rule's dim that the tokens are in, and their place in it.

    Where they are cut into chunks, the place is that of the chunks, if each is of one slice.
    """
    minor = 1
    cuts = slices.cuts_of(place)
    tokens = cuts[-1]
    for name in reversed(dim):
        size = rule.factor(name).size
        if place.after:
            if len(dim) > 1 or size != tokens + place.after:
                raise StraddlingError
            return name, place
        if place.inner % minor == 0:
            inner = place.inner // minor
            if inner * tokens <= size and size % (inner * tokens) == 0:
                return name, evolve(place, outer=size // (inner * tokens), inner=inner)
        elif minor % place.inner == 0 and minor // place.inner * size == tokens:
            return name, _of_chunks(place, minor // place.inner, cuts, slices)
        minor *= size
    raise StraddlingError


def _of_chunks(place: Place, chunk: int, cuts: Sequence[int], slices: Slices) -> Place:
    if any(cut % chunk for cut in cuts):
        tokens = chunk * max(slices.tokens // cuts[-1], 1)
        raise StraddlingError(
            f"cuts the tokens into chunks of {tokens}, and some slice ends inside one: use "
            f"token_slices that are multiples of {tokens}",
            tokens,
        )
    return Place(place.kind, cuts=tuple(cut // chunk for cut in cuts))


def dim_place(rule: ShardingRule, dim: Sequence[str], name: str, place: Place) -> Place:
    """Return the place in a dim of tokens at a place in one of its factors."""
    sizes = [rule.factor(one).size for one in dim]
    at = list(dim).index(name)
    return evolve(
        place,
        outer=math.prod(sizes[:at]) * place.outer,
        inner=place.inner * math.prod(sizes[at + 1 :]),
    )
