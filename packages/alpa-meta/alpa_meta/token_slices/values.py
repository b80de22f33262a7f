"""What an analysis says: of every value how the slices hold it, of every equation how they run
it."""

from __future__ import annotations

from attrs import define, evolve, field, frozen

from alpa_meta.compat import Atom, ClosedJaxpr, Literal, Var, shape_of
from alpa_meta.errors import PlanError
from alpa_meta.operators.linear import Unknown
from alpa_meta.token_slices.bounds import Scope
from alpa_meta.token_slices.places import ROW, Layout, Place, Slices, whole
from alpa_meta.token_slices.reading import Reading, UnreadableError

BEFORE, BETWEEN, AFTER = range(3)
"""When a known value is: before the forward sweep, between the sweeps, after the backward one."""


@frozen
class Value:
    """What is known of a value: "known", "sliced" or "addend".

    Of a known value `layout` says where the tokens of the batch lie in it, which it is cut along
    where parameters meet it; `of_batch`: that it depends on no parameter. `when`: see `BEFORE`; of
    others the sweep that makes them. `rest`: see `masking`. `dead`: that a mask may have left out a
    token's own key, so that no key of it is known to be live. `later`: what stands behind the keys
    of every slice, if that is no number (`later_blocks`).
    """

    state: str
    layout: Layout
    when: int = BEFORE
    of_batch: bool = False
    rest: float | None = None
    dead: bool = False
    longer: int | None = None  # the dim with one token more than the slices have
    why: str = ""  # what made it known no earlier
    later: Unknown | None = None

    @property
    def in_parts(self) -> bool:
        """Whether each slice has its own."""
        return self.state != "known"

    @property
    def done(self) -> int:
        """When all of it is known."""
        return self.when + self.in_parts


@frozen(eq=False)
class Known:
    """An equation of known values."""


@frozen(eq=False)
class Recomputed:
    """An equation that the backward pass recomputes, of what the forward pass made, and that it
    could not run slice by slice from the last one on: each slice runs it on all tokens."""


@frozen(eq=False)
class Sliced:
    """An operator that every slice runs on its part."""

    reading: Reading


@frozen(eq=False)
class Added:
    """An operator that is linear in the parts of sums, which stay parts."""

    group: tuple[int, ...]


@frozen(eq=False)
class Running:
    """A running sum along the tokens, handed from slice to slice.

    `again`: it is recomputed in the backward pass, whose first slice is the last: by each slice
    from the first token on.
    """

    layout: Layout
    again: bool


@frozen(eq=False)
class TokenLoop:
    """A scan over the tokens, or chunks of them, at `place`, whose carry is handed from slice to
    slice.

    Inside another loop or a recomputation, `sums` are the carries that it only adds to, of which
    each slice has a part, and `last` others that are read behind it: the last slice has all of
    those. `again`: see `Running`.
    """

    place: Place
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    sums: frozenset[int]
    last: frozenset[int]
    again: bool


@frozen(eq=False)
class Region:
    """A recomputation or a scan over layers, whose body each slice runs its part of."""

    body: Analysis
    num_consts: int
    num_carry: int
    is_scan: bool


@frozen(eq=False)
class Blocks:
    """A loop over blocks of tokens, at `place`, whose body looks back on all before (`blocks`);
    `sums` are the carries that it only adds to."""

    body: Analysis
    num_consts: int
    num_carry: int
    place: Place
    sums: frozenset[int]


@frozen(eq=False)
class KeyBlocks:
    """A loop over blocks of keys, at `place`, of which each slice runs those up to its end;
    `results` are what is known of what the body makes."""

    body: Analysis
    num_consts: int
    num_carry: int
    place: Place
    results: tuple[Value, ...]


@frozen(eq=False)
class Branches:
    """A conditional, of whose branches each slice runs its part; `results` are what is known of
    what either makes."""

    bodies: tuple[Analysis, ...]
    results: tuple[Value, ...]


@frozen
class Window:
    """A convolution along the tokens (`windows`): the number of its spatial dim, that dim of the
    left operand and of the result, and its padding."""

    dim: int
    left: int
    out: int
    low: int
    high: int


@frozen
class WindowSum:
    """A convolution of tokens with tokens, the gradient of a kernel (`convolved`): the number of
    its spatial dim, that dim of both operands, and the places of the tokens there."""

    dim: int
    left: int
    right: int
    met: Place
    rows: Place


@frozen
class Moved:
    """A slice, padding, concatenation or split along the dim of tokens, and the places of its
    results there (`moves`). `again`: see `Running`."""

    dim: int
    places: tuple[Place, ...]
    again: bool = False


@frozen(eq=False)
class MovedKeys:
    """A slice, padding or concatenation along the dim of the keys of one operand, its `source`
    (`key_moves`)."""

    dim: int
    source: int
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


@frozen(eq=False)
class OneToken:
    """A layout operator that drops a dim of tokens, of which one slice has the only element."""

    slice_number: int


Decision = (
    Known
    | Recomputed
    | OneToken
    | Sliced
    | Added
    | Running
    | TokenLoop
    | Window
    | WindowSum
    | Moved
    | MovedKeys
    | Region
    | Blocks
    | KeyBlocks
    | Branches
)


@define(eq=False)
class Analysis:
    """How the equations of a program, or of a body, run in slices.

    `sweeps` has, by equation, whether the forward (0) or the backward sweep (1) runs it, 2 for the
    update. `whole`: why the first equation of weights and tokens is of all tokens at once.
    """

    closed: ClosedJaxpr
    sweeps: tuple[int, ...]
    slices: Slices
    values: dict[Var, Value] = field(factory=dict)
    decisions: list[Decision] = field(factory=list)
    whole: str = ""
    scope: Scope | None = None

    @property
    def is_sliced(self) -> bool:
        """Whether the forward sweep makes any value slice by slice."""
        return any(one.state == "sliced" and one.when == BEFORE for one in self.values.values())

    def value(self, atom: Atom) -> Value:
        """Return what is known of an operand."""
        if isinstance(atom, Literal):
            return Value("known", whole(len(shape_of(atom))), of_batch=True)
        return self.values[atom]


class SlicingError(PlanError):
    """A program that cannot run in token slices; `chunk`: of lengths that are no multiples of so
    many tokens."""

    def __init__(self, reason: str, chunk: int = 0) -> None:
        super().__init__(reason)
        self.chunk = chunk


def is_joinable(value: Value) -> bool:
    """Return whether the parts of all slices make up the value: their rows, behind which there is
    nothing where they have keys."""
    if value.state != "sliced":
        return value.state == "known"
    places = [place for place in value.layout if place is not None]
    keys = [place for place in places if place.kind != ROW]
    if keys and (value.rest != 0.0 or any(p.outer > 1 or p.cuts or p.after for p in keys)):
        return False
    return len(places) == 1 + len(keys) and len(keys) < 2


def joined_carry(before: Value, after: Value) -> Value:
    """Return what a carry must be taken for that starts as one value and comes back as another."""
    after = evolve(after, rest=None, later=None, longer=None, of_batch=False)
    if not before.in_parts and not after.in_parts:
        return evolve(before, when=max(before.when, after.when))
    if not before.in_parts:
        return after
    if not after.in_parts:
        return before
    if (before.state, before.layout) != (after.state, after.layout):
        if any(place and place.cuts for place in after.layout):
            raise UnreadableError(
                "carries to the next iteration what waits for tokens of another slice, as where "
                "`jnp.roll` puts the last tokens first"
            )
        raise UnreadableError("carries tokens from one iteration to the next in another dim")
    return evolve(before, when=max(before.when, after.when), dead=before.dead or after.dead)
