"""What a value known before the step holds at given tokens: bounds of masks and positions.

A mask is never made to be looked at. Its producers are asked in turn for the tokens in question,
down to the positions (iota) and constants, whose bounds there are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve, frozen

from alpa_meta.compat import (
    Atom,
    JaxprEqn,
    Literal,
    Var,
    dtype_of,
    is_drop,
    shape_of,
)
from alpa_meta.operators import counted_dim, operator_of, sharding_rule
from alpa_meta.operators.cutting import is_front, rearrangement
from alpa_meta.operators.intervals import (
    Interval,
    holds_exactly,
    hull,
    of_equals,
    of_type,
    results_of,
)
from alpa_meta.operators.ordering import is_running_sum
from alpa_meta.token_slices.alike import Element, alike, operand_labels
from alpa_meta.token_slices.places import (
    BLOCK,
    KEY,
    ROW,
    Layout,
    Place,
    Slices,
    StraddlingError,
    dim_place,
    factor_place,
    kinds,
    whole,
)
from alpa_meta.types import HostArray, Ints

_MOST_DIFFERENCES = 1 << 24  # elements of a constant array whose bounds are taken


@frozen
class After:
    """The tokens right of a slice: its rows, and the keys behind its last one."""

    number: int


@frozen
class Diagonal:
    """Every token as a row, and itself as the key: the row's number among the keys, plus `key`."""

    key: int = 0


@frozen
class Own(Diagonal):
    """The same inside loops over blocks of tokens: what each token meets of itself, in the
    iterations that have its block."""


class Scope:
    """The equations and constants that values known before the step come from.

    `outer` maps the inputs of a region's body to what the region reads there, in `parent`; that is
    stacked over the iterations for those in `scanned`. `made_in` says of what a region makes in
    which body, as what, and whether it is stacked.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        constants: Mapping[Var, HostArray],
        slices: Slices,
        parent: Scope | None = None,
        outer: Mapping[Var, Atom] | None = None,
        scanned: frozenset[Var] = frozenset(),
    ) -> None:
        self.producer = {var: eqn for eqn in eqns for var in eqn.outvars if not is_drop(var)}
        self.constants = constants
        self.slices = slices
        self.parent, self.outer, self.scanned = parent, dict(outer or {}), scanned
        self.made_in: dict[Var, tuple[Scope, Atom, bool]] = {}
        self.place: Place | None = None  # of the blocks of tokens that a loop runs over
        self.weights: frozenset[Var] = frozenset()  # inputs that are not of the batch
        self._found: dict[tuple[Var, Layout, After | Diagonal], Interval] = {}

    def bounds(self, atom: Atom, layout: Layout, where: After | Diagonal) -> Interval:
        """Return the bounds of a value whose tokens lie as `layout` says."""
        if isinstance(atom, Literal):
            return _of_values(np.asarray(atom.val))
        key = atom, layout, where
        if key not in self._found:
            self._found[key] = self._bounds(atom, layout, where)
        return self._found[key]

    @property
    def in_blocks(self) -> bool:
        """Whether iterations of a loop around have rows of their own."""
        return self.place is not None or self.parent is not None and self.parent.in_blocks

    def chunk(self, place: Place) -> int:
        """Return how many tokens each element at a place has; 0 if that cannot be said."""
        size = self.slices.tokens // max(self.slices.cuts_of(place)[-1], 1)
        chunks = tuple(cut * size for cut in self.slices.cuts_of(place))
        return size if chunks == self.slices.cuts and not place.after else 0

    @property
    def blocks(self) -> list[Place]:
        """The places of the blocks of all loops around over blocks of tokens."""
        around = self.parent.blocks if self.parent is not None else []
        return around if self.place is None else [*around, self.place]

    def is_weight(self, atom: Atom) -> bool:
        """Return whether a value is a weight."""
        if isinstance(atom, Literal):
            return False
        elsewhere = self._elsewhere(atom, whole(len(shape_of(atom))))
        if elsewhere is not None:
            scope, held, _ = elsewhere
            return scope.is_weight(held)
        return atom in self.weights

    def _elsewhere(self, var: Var, layout: Layout) -> tuple[Scope, Atom, Layout] | None:
        """Return where a value comes from that is given to this body, made in another, or passed
        on."""
        if var in self.outer and self.parent is not None:
            stacked = var in self.scanned
            return self.parent, self.outer[var], (self.place, *layout) if stacked else layout
        eqn = self.producer.get(var)
        if eqn is not None and operator_of(eqn).passes_on:
            return self, eqn.invars[eqn.outvars.index(var)], layout
        if var not in self.made_in:
            return None
        scope, atom, stacked = self.made_in[var]
        if stacked and layout[0] != scope.place:
            return None
        return scope, atom, layout[1:] if stacked else layout

    def made_of(self, atom: Atom, layout: Layout) -> tuple[Scope, JaxprEqn, list[Layout]] | None:
        """Return the equation that makes a value, where it stands, and what parts of its operands
        it makes that part of; None for inputs, and where that cannot be said."""
        if isinstance(atom, Literal):
            return None
        elsewhere = self._elsewhere(atom, layout)
        if elsewhere is not None and self.place is not None and atom in self.scanned:
            return None
        if elsewhere is not None:
            scope, held, of_held = elsewhere
            return scope.made_of(held, of_held)
        eqn = self.producer.get(atom)
        if eqn is None or eqn.outvars[0] is not atom:
            return None
        layouts = _read_layouts(eqn, layout, self.slices)
        return None if layouts is None else (self, eqn, layouts)

    def _bounds(self, var: Var, layout: Layout, where: After | Diagonal) -> Interval:
        own_block = self.place is not None and var in self.scanned
        if own_block and isinstance(where, Diagonal) and not isinstance(where, Own):
            return of_type(dtype_of(var))
        if var in self.constants:
            return self._of_constant(self.constants[var], layout, where)
        elsewhere = self._elsewhere(var, layout)
        if elsewhere is not None:
            scope, held, of_held = elsewhere
            return scope.bounds(held, of_held, where)
        eqn = self.producer.get(var)
        if eqn is None or eqn.outvars[0] is not var:
            return of_type(dtype_of(var))
        counted = counted_dim(eqn)
        if counted is not None:
            found = self._counted(layout[counted], shape_of(var)[counted], where)
            exact = holds_exactly(dtype_of(var), float(shape_of(var)[counted]))
            return found if exact else of_type(dtype_of(var))
        pieces = joined_pieces(eqn, layout, where, self.slices)
        if pieces is not None:
            return hull([self.bounds(*piece) for piece in pieces] or [of_type(dtype_of(var))])
        if is_running_sum(eqn):
            return self._of_sums(eqn, layout, where)
        layouts = _read_layouts(eqn, layout, self.slices)
        if layouts is None:
            return of_type(dtype_of(var))
        own = self._of_itself(eqn, layout, where) if isinstance(where, Diagonal) else None
        if own is not None:
            return own
        pairs = zip(eqn.invars, layouts, strict=True)
        return results_of(eqn, [self.bounds(atom, one, where) for atom, one in pairs])

    def _of_itself(self, eqn: JaxprEqn, layout: Layout, where: Diagonal) -> Interval | None:
        """Return what an equation makes of a token and itself, such as whether both are of one
        segment; None if that cannot be said."""
        found = of_equals(eqn)
        in_blocks = self.in_blocks or BLOCK in kinds(layout)
        if found is None or where.key or in_blocks and not isinstance(where, Own):
            return None
        labels = tuple(
            d if place is None else self._label(place, where) for d, place in enumerate(layout)
        )
        sides = [(self, atom, operand_labels(eqn, k, labels)) for k, atom in enumerate(eqn.invars)]
        return found if alike(*sides) else None

    def _label(self, place: Place, where: Diagonal) -> Element | None:
        """Return which element of a dim is a token's own; None if that cannot be said."""
        size = self.slices.cuts_of(place)[-1]
        if place.outer * place.inner > 1:
            return None
        if place.kind == BLOCK:
            return Element(1, size)
        each = self.chunk(place)
        if each == 0 and not isinstance(where, Own):
            return Element(1, size + place.after)
        return Element(each, size) if each else None

    def _counted(self, place: Place | None, size: int, where: After | Diagonal) -> Interval:
        """Return the bounds of what counts the places along a dim."""
        if place is None or place.outer > 1 or place.inner > 1:
            return Interval(0.0, size - 1.0)
        if isinstance(where, Own):
            return self._own(place) or Interval(0.0, size - 1.0)
        if place.kind == BLOCK:
            return Interval(0.0, size - 1.0)
        if isinstance(where, Diagonal):
            first = where.key if place.kind == KEY else 0
            return Interval(first, first, 1.0, size - place.after - 1 - first)
        start, stop = self._span(place, where.number)
        return Interval(float(start), stop - 1.0)

    def _own(self, place: Place) -> Interval | None:
        """Return which element at a place a token is, is of or, of its block, is the place in."""
        last = self.slices.tokens - 1
        if place.kind == BLOCK:
            return Interval(0.0, 0.0, 1.0, last, ((place.cuts[-1], -1.0 * place.cuts[-1]),))
        size = self.chunk(place)
        if size < 2:
            return Interval(0.0, 0.0, 1.0, last) if size else None
        return Interval(0.0, 0.0, 0.0, last, ((size, 1.0),))

    def _of_sums(self, eqn: JaxprEqn, layout: Layout, where: After | Diagonal) -> Interval:
        """Return the bounds of running sums of integers: each of so many of them."""
        (atom,), (result,), dim = eqn.invars, eqn.outvars, int(eqn.params["axis"])
        held = tuple(None if d == dim else place for d, place in enumerate(layout))
        each, place = self.bounds(atom, held, where).flat(), layout[dim]
        size, dtype = shape_of(atom)[dim], dtype_of(result)
        ends = float(each.low), float(each.high)
        exact = all(end.is_integer() and holds_exactly(dtype, end * size) for end in ends)
        if eqn.params["reverse"] or not exact:
            return of_type(dtype)
        count = self._counted(place, size, where)
        count = evolve(count, low=count.low + 1, high=count.high + 1)
        if each.constant is not None:
            return count.scaled(each.low)
        count = count.flat()
        low = min(each.low * count.low, each.low * count.high)
        return Interval(low, max(each.high * count.low, each.high * count.high))

    def _span(self, place: Place, number: int) -> tuple[int, int]:
        """Return the rows of a slice, or the keys behind its last row."""
        cuts = self.slices.cuts_of(place)
        start, stop = cuts[number : number + 2]
        return (start, stop) if place.kind == ROW else (stop, cuts[-1])

    def _of_constant(self, value: HostArray, layout: Layout, where: After | Diagonal) -> Interval:
        counted = {ROW, KEY, BLOCK} if isinstance(where, Own) else {ROW, KEY}
        dims = [(d, p) for d, p in enumerate(layout) if p is not None and p.kind in counted]
        if value.size > _MOST_DIFFERENCES or any(p.outer > 1 or p.inner > 1 for _, p in dims):
            return of_type(value.dtype)
        if isinstance(where, After):
            for d, place in dims:
                value = value.take(range(*self._span(place, where.number)), axis=d)
            return _of_values(value)
        for d, place in dims:
            value = value.take(range(value.shape[d] - place.after), axis=d)
        if isinstance(where, Own):
            return self._of_own(value, dims)
        if {place.kind for _, place in dims} == {ROW, KEY}:
            (row, key) = (d for d, _ in sorted(dims, key=lambda one: one[1].kind == KEY))
            return _of_values(np.diagonal(value, where.key, row, key))
        if len(dims) == 1 and np.issubdtype(value.dtype, np.number):
            ((d, place),) = dims
            moved = np.moveaxis(value, d, -1)[..., where.key if place.kind == KEY else 0 :]
            steps = np.unique(np.diff(moved, axis=-1))
            if steps.size == 1 and math.isfinite(float(steps[0])):
                slope = float(steps[0])
                first = _of_values(moved[..., 0])
                return Interval(first.low, first.high, slope, moved.shape[-1] - 1)
        return _of_values(value)

    def _of_own(self, value: HostArray, dims: Sequence[tuple[int, Place]]) -> Interval:
        """Return the bounds of the elements of a constant array that tokens are at in `dims`."""
        counted = [self._own(place) for _, place in dims]
        if len(dims) == 1 and counted[0] is not None and np.issubdtype(value.dtype, np.number):
            steps = np.unique(np.diff(value, axis=dims[0][0]))
            if steps.size == 1 and math.isfinite(float(steps[0])):
                first = _of_values(value.take(0, axis=dims[0][0]))
                own = counted[0].scaled(float(steps[0]))
                return evolve(own, low=first.low, high=first.high)
        tokens = np.arange(self.slices.tokens)
        at: list[Ints] = []
        for one in counted:
            if one is None:
                return _of_values(value)
            places = one.slope * tokens + sum((c * (tokens // size) for size, c in one.blocks), 0)
            at.append(places.astype(int))
        counted_first = np.moveaxis(value, [d for d, _ in dims], range(len(dims)))
        return _of_values(counted_first[tuple(at)])


def operand_layouts(eqn: JaxprEqn, layout: Layout, slices: Slices) -> list[Layout] | None:
    """Return what of its operands an operator reads for a part of its first result; None if that
    cannot be said, or if a part would not do."""
    rule = sharding_rule(eqn)
    if rule is None or eqn.effects:
        return None
    places: dict[str, Place] = {}
    for dim, place in zip(rule.results[0], layout, strict=True):
        if place is None:
            continue
        try:
            name, found = factor_place(rule, dim, place, slices)
        except StraddlingError:
            return None
        if rule.factor(name).kind != "parallel":
            return None
        places[name] = found
    layouts = []
    for dims in rule.operands:
        held: list[Place | None] = []
        for dim in dims:
            names = [name for name in dim if name in places]
            if len(names) == len(dim) == 2:
                held.append(_joined([places[name] for name in names], slices))
                if held[-1] is None:
                    return None
                continue
            if len(names) > 1:
                return None
            held.append(
                slices.settled(dim_place(rule, dim, names[0], places[names[0]])) if names else None
            )
        layouts.append(tuple(held))
    return layouts


def _read_layouts(eqn: JaxprEqn, layout: Layout, slices: Slices) -> list[Layout] | None:
    """Return what of its operands an operator reads for a part of its first result: of what is cut
    out of longer ones, such as a mask for the longest sequence, the elements in front."""
    if not any(place and is_front(eqn, d) for d, place in enumerate(layout)):
        return operand_layouts(eqn, layout, slices)
    found: list[Place | None] = []
    sizes = zip(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), strict=True)
    for d, (place, (size, kept)) in enumerate(zip(layout, sizes, strict=True)):
        if place is not None and size > kept:
            if place.outer * place.inner > 1 or not is_front(eqn, d):
                return None
            place = evolve(place, after=place.after + size - kept)
        found.append(place)
    return [tuple(found)]


def _joined(places: Sequence[Place], slices: Slices) -> Place | None:
    """Return the place of the tokens of blocks and of what is in a block; None of other dims."""
    of_blocks, within = places
    blocks, size = slices.cuts_of(of_blocks), slices.cuts_of(within)[-1]
    plain = (of_blocks.outer, of_blocks.inner, of_blocks.after, within.outer, within.inner)
    if within.kind != BLOCK or of_blocks.kind == BLOCK or plain != (1, 1, 0, 1, 1):
        return None
    tokens = tuple(cut * size for cut in blocks)
    return Place(of_blocks.kind) if tokens == slices.cuts else None


def joined_pieces(
    eqn: JaxprEqn, layout: Layout, where: After | Diagonal, slices: Slices
) -> list[tuple[Atom, Layout, After | Diagonal]] | None:
    """Return the operands that hold a part of what is joined, or padded, along a dim of tokens, and
    which part; None for what is not joined so."""
    kind = rearrangement(eqn)
    if kind not in ("joined", "padded") or isinstance(where, Own):
        return None
    if kind == "joined":
        dim, atoms = eqn.params["dimension"], list(eqn.invars)
        sizes = [shape_of(atom)[dim] for atom in atoms]
    else:
        source, filler = eqn.invars
        config = [tuple(map(int, one)) for one in eqn.params["padding_config"]]
        padded = [d for d, one in enumerate(config) if any(one)]
        if len(padded) != 1 or min(config[padded[0]]) < 0 or config[padded[0]][2]:
            return None
        (dim,) = padded
        low, high, _ = config[dim]
        atoms, sizes = [filler, source, filler], [low, shape_of(source)[dim], high]
    place = layout[dim]
    if place is None or place.outer * place.inner > 1:
        return None
    pieces: list[tuple[Atom, Layout, After | Diagonal]] = []
    cuts, first = slices.cuts_of(place), 0
    for atom, size in zip(atoms, sizes, strict=True):
        inside = tuple(min(max(cut - first, 0), size) for cut in cuts)
        held = slices.settled(Place(place.kind, cuts=inside, after=size - inside[-1]))
        own = tuple(held if d == dim else one for d, one in enumerate(layout))
        own = own if shape_of(atom) else ()
        if isinstance(where, After):
            start, stop = inside[where.number : where.number + 2]
            start, stop = (start, stop) if place.kind == ROW else (stop, inside[-1])
            if start < stop:
                pieces.append((atom, own, where))
        elif place.kind == KEY and 0 <= where.key - first <= size - slices.tokens:
            pieces.append((atom, own, Diagonal(where.key - first)))
        first += size
    return pieces


def _of_values(value: HostArray) -> Interval:
    numeric = value.dtype == np.bool_ or np.issubdtype(value.dtype, np.number)
    if value.size == 0 or np.iscomplexobj(value):
        return of_type(value.dtype)
    if not numeric:  # such as bfloat16
        try:
            value = value.astype(np.float32)
        except (TypeError, ValueError):
            return of_type(value.dtype)
    low, high = float(value.min()), float(value.max())
    return Interval(low, high) if not math.isnan(low + high) else hull([Interval()])
