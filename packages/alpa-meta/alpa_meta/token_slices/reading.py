"""How one operator runs on a slice: what it reads of each operand and makes of each result.

The tokens are in a factor of the operator's sharding rule: a parallel factor keeps them, a
reduction over rows is a sum over the slices, a reduction over keys is one over the slice's prefix.
An operator may meet tokens twice (a query with the keys): one of the two factors is the rows, the
other the keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn, shape_of
from alpa_meta.operators import operator_of, sharding_rule
from alpa_meta.operators.elementwise import is_elementwise
from alpa_meta.token_slices.cuts import Cutting
from alpa_meta.token_slices.places import (
    KEY,
    ROW,
    Layout,
    Place,
    Slices,
    StraddlingError,
    dim_place,
    factor_place,
    kinds,
)

Chooser = Callable[[Sequence[str]], str]
"""Says which of two factors of rows is that of the keys."""

COMBINED = ("add", "max", "min", "or", "and")
"""How the parts of a result of all rows may be combined."""


@frozen
class Reading:
    """The layouts of operands and results of an operator in a slice.

    `combined` is how the rows are reduced ("add", "max"; empty: they are not): results without rows
    are combined of those of the slices, for the keys of a result at the keys' own slice.
    `reduced_keys` is how keys are reduced.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    combined: str = ""
    reduced_keys: str = ""

    def is_sum(self, result: int) -> bool:
        """Return whether a result is added up over the slices."""
        return bool(self.combined) and kinds(self.results[result]) == set()

    def scatters(self, result: int) -> bool:
        """Return whether each slice adds to what a result is in the slices before it."""
        return bool(self.combined) and kinds(self.results[result]) == {KEY}


class UnreadableError(Exception):
    """An operator that cannot run on slices; `reason` reads on after its line and name. `chunk`:
    that slices are to be multiples of so many tokens."""

    def __init__(self, reason: str, chunk: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.chunk = reason, chunk


def reading_of(
    eqn: JaxprEqn, layouts: Sequence[Layout], cutting: Cutting, choose: Chooser
) -> Reading:
    """Return how `eqn` runs on operands of these layouts; UnreadableError if it cannot."""
    rule, operator = sharding_rule(eqn), operator_of(eqn)
    if operator.passes_on:
        return Reading(tuple(layouts), tuple(layouts))
    if is_elementwise(eqn) and any(p and p.cuts and p.cuts[-1] < 2 for one in layouts for p in one):
        return _of_short_dim(eqn, layouts, cutting)
    if rule is None:
        raise UnreadableError("has no sharding rule to slice it by")
    places = _factor_places(rule, layouts, cutting)
    if operator.causal is not None:
        places = _of_attention(places, *operator.causal)
    places = _one_of_each(places, choose)
    if operator.causal is None:
        for name, place in places.items():
            _check_factor(eqn, rule, name)
            if _is_computed(eqn, rule, name):
                _check_computed(operator.written is not None, place, cutting.slices)
    found = reading_at(rule, places, cutting.slices)
    if operator.causal is not None and not found.combined:
        if not all(operator.causal[0] in itertools.chain(*dims) for dims in rule.results):
            found = evolve(found, combined="add")
    combined, results = found.combined, found.results
    of_tokens = any(map(any, results))
    if combined and (combined not in COMBINED or combined != "add" and of_tokens):
        raise UnreadableError(f"takes the {combined} over all tokens")
    if not combined and any(ROW in kinds(one) for one in found.operands):
        if any(ROW not in kinds(one) for one in results):
            raise UnreadableError("mixes tokens")
    return found


def reading_at(rule: ShardingRule, places: dict[str, Place], slices: Slices) -> Reading:
    """Return how an operator runs whose factors hold the tokens at these places."""
    reductions = {
        place.kind: rule.factor(name).reduction
        for name, place in places.items()
        if rule.factor(name).kind == "reduction"
    }
    operands = tuple(_layout(rule, dims, places, slices) for dims in rule.operands)
    results = tuple(_layout(rule, dims, places, slices) for dims in rule.results)
    return Reading(operands, results, reductions.get(ROW, ""), reductions.get(KEY, ""))


def _factor_places(
    rule: ShardingRule, layouts: Sequence[Layout], cutting: Cutting
) -> dict[str, Place]:
    places: dict[str, Place] = {}
    bound: set[str] = set()  # factors of the tokens of operands that the sweep itself makes
    free = cutting.free or (False,) * len(layouts)
    for k in sorted(range(len(layouts)), key=lambda k: free[k]):
        for dim, place in zip(rule.operands[k], layouts[k], strict=True):
            if place is None:
                continue
            try:
                name, found = factor_place(rule, dim, place, cutting.slices)
            except StraddlingError as error:
                raise UnreadableError(error.reason, error.chunk) from None
            known = places.setdefault(name, found)
            if evolve(known, kind=found.kind, cuts=found.cuts) != found:
                raise UnreadableError("meets tokens at different places of a dim")
            if KEY in (found.kind, known.kind):
                if found.cuts != known.cuts:
                    raise UnreadableError("looks back on what is made of later tokens")
                places[name] = evolve(found, kind=KEY)
            elif known.cuts != found.cuts and not (free[k] and name in bound):
                if cutting.slices.cuts_of(known)[-1] != cutting.slices.cuts_of(found)[-1]:
                    raise UnreadableError("meets tokens at different places of a dim")
                places[name] = cutting.joined(known, found)
            if not free[k]:
                bound.add(name)
    return places


def _of_short_dim(eqn: JaxprEqn, layouts: Sequence[Layout], cutting: Cutting) -> Reading:
    """Return how an elementwise operator runs on dims of one element or none, which have no
    factor."""
    shape = shape_of(eqn.outvars[0])
    joined: list[Place | None] = [None] * len(shape)
    free = cutting.free or (False,) * len(layouts)
    for k in sorted(range(len(layouts)), key=lambda k: free[k]):
        for d, place in enumerate(layouts[k]):
            known = joined[d]
            if place is None or known is not None and free[k]:
                continue
            if shape_of(eqn.invars[k])[d] != shape[d]:
                raise UnreadableError("gives all tokens a part of one of them")
            if place.kind == KEY:
                raise UnreadableError("looks back on what is made of later tokens")
            joined[d] = place if known is None else cutting.joined(known, place)
    operands = tuple(
        tuple(p if size == whole else None for p, size, whole in zip(joined, sizes, shape))
        for sizes in map(shape_of, eqn.invars)
    )
    return Reading(operands, (tuple(joined),) * len(eqn.outvars))


def _of_attention(places: dict[str, Place], rows: str, keys: str) -> dict[str, Place]:
    """Return the places of what an attention reads, which says where its keys are."""
    if not places or not {*places} <= {rows, keys}:
        raise UnreadableError(f"reads tokens elsewhere than in its factors {rows!r} and {keys!r}")
    if any(place.cuts for place in places.values()):
        raise UnreadableError("looks back on what is made of later tokens")
    if rows in places and places[rows].kind == KEY:
        raise UnreadableError("reads the keys of a slice as its rows")
    (either, *_) = places.values()
    found = {ROW: places.get(rows, either), KEY: places.get(keys, either)}
    return {rows: evolve(found[ROW], kind=ROW), keys: evolve(found[KEY], kind=KEY)}


def _one_of_each(places: dict[str, Place], choose: Chooser) -> dict[str, Place]:
    """Return the places with at most one factor of rows and one of keys."""
    rows = [name for name, place in places.items() if place.kind == ROW]
    num_keys = len(places) - len(rows)
    if num_keys > 1 or len(places) > 2:
        raise UnreadableError("meets the keys of the tokens in two dims")
    if len(rows) == 2:
        chosen = choose(rows)
        return {**places, chosen: evolve(places[chosen], kind=KEY)}
    return places


def _check_factor(eqn: JaxprEqn, rule: ShardingRule, name: str) -> None:
    factor = rule.factor(name)
    if factor.kind not in ("parallel", "reduction") or factor.halo:
        raise UnreadableError("mixes tokens")


def _is_computed(eqn: JaxprEqn, rule: ShardingRule, name: str) -> bool:
    """Return whether an operator reads or writes a factor of the tokens at computed places."""
    operator = operator_of(eqn)
    if operator.written is not None:
        return all(name not in dim for dim in rule.operands[operator.written])
    return operator.indices is not None and rule.factor(name).kind == "reduction"


def _check_computed(writes: bool, place: Place, slices: Slices) -> None:
    """Raise UnreadableError unless each slice can read, or write, what it has of the rows: what it
    reads is a sum over the slices, 0 of those without the row."""
    cuts = slices.cuts_of(place)
    if place.kind == KEY or any(one == two for one, two in itertools.pairwise(cuts)):
        doing = "writes" if writes else "reads"
        raise UnreadableError(f"{doing} at computed places among the tokens")


def _layout(
    rule: ShardingRule, dims: Sequence[tuple[str, ...]], places: dict[str, Place], slices: Slices
) -> Layout:
    held: list[Place | None] = []
    for dim in dims:
        names = [name for name in dim if name in places]
        if len(names) > 1:
            raise UnreadableError("joins two dims of tokens")
        place = dim_place(rule, dim, names[0], places[names[0]]) if names else None
        held.append(place and slices.settled(place))
    return tuple(held)


def keys_of(layout: Layout) -> Layout:
    """Return a layout of rows as one of keys."""
    return tuple(place and evolve(place, kind=KEY) for place in layout)


def as_keys(reading: Reading) -> Reading:
    """Return how an operator that keeps rows apart makes its keys of keys."""
    return Reading(tuple(map(keys_of, reading.operands)), tuple(map(keys_of, reading.results)))
