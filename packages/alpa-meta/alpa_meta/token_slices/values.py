"""What an analysis says: of every value how the slices hold it, of every equation how they run
it."""

from __future__ import annotations

from attrs import define, field, frozen

from alpa_meta.compat import Atom, ClosedJaxpr, Literal, Var, shape_of
from alpa_meta.errors import PlanError
from alpa_meta.token_slices.places import Layout, Slices, whole
from alpa_meta.token_slices.reading import Reading

BEFORE, BETWEEN, AFTER = range(3)
"""When a known value is: before the forward sweep, between the sweeps, after the backward one."""


@frozen
class Value:
    """What is known of a value: "known", "sliced" or "addend".

    Of a known value `layout` says where the tokens of the batch lie in it, which it is cut along
    where parameters meet it; `of_batch`: that it depends on no parameter. `when`: see `BEFORE`; of
    others the sweep that makes them. `rest`: see `masking`.
    """

    state: str
    layout: Layout
    when: int = BEFORE
    of_batch: bool = False
    rest: float | None = None
    longer: int | None = None  # the dim with one token more than the slices have
    why: str = ""  # it is no more than known after the backward sweep

    @property
    def in_parts(self) -> bool:
        """Whether each slice has its own."""
        return self.state != "known"


@frozen(eq=False)
class Known:
    """An equation of known values."""


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
    """A running sum along the tokens, handed from slice to slice."""

    layout: Layout


@frozen(eq=False)
class TokenLoop:
    """A scan over the tokens, whose carry is handed from slice to slice."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


@frozen(eq=False)
class Region:
    """A recomputation or a scan over layers, whose body each slice runs its part of."""

    body: Analysis
    num_consts: int
    num_carry: int
    is_scan: bool


Decision = Known | Sliced | Added | Running | TokenLoop | Region


@define(eq=False)
class Analysis:
    """How the equations of a program, or of a body, run in slices.

    `sweeps` has, by equation, whether the forward (0) or the backward sweep (1) runs it, 2 for the
    update.
    """

    closed: ClosedJaxpr
    sweeps: tuple[int, ...]
    slices: Slices
    values: dict[Var, Value] = field(factory=dict)
    decisions: list[Decision] = field(factory=list)

    def value(self, atom: Atom) -> Value:
        """Return what is known of an operand."""
        if isinstance(atom, Literal):
            return Value("known", whole(len(shape_of(atom))), of_batch=True)
        return self.values[atom]


class SlicingError(PlanError):
    """A program that cannot run in token slices."""
