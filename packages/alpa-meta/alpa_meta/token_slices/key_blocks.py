"""Loops over blocks of keys, for all queries at once or a block of them: flash attention by hand.

    m, l, o = f(m, l, o, queries, block j of the keys, j)       `lax.scan`, `lax.map`

Each slice runs the loop over the blocks up to its end, for its own rows; that the blocks behind
change nothing is proved (`later_blocks`). What the loop stacks has those blocks of keys too, and
what it stacks in the backward pass is the gradients of the keys, to which all slices that look back
on them add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from alpa_meta.compat import Atom, JaxprEqn, Var, is_drop, open_jaxpr, scan_counts, shape_of
from alpa_meta.operators import operator_signature, sharding_rule
from alpa_meta.operators.elementwise import is_elementwise
from alpa_meta.operators.linear import Linear
from alpa_meta.operators.regions import bodies
from alpa_meta.token_slices.bounds import Own, Scope
from alpa_meta.token_slices.later_blocks import Unknowns, in_later_blocks, linear
from alpa_meta.token_slices.places import KEY, ROW, Layout, Place, kinds, whole
from alpa_meta.token_slices.reading import UnreadableError
from alpa_meta.token_slices.recurrences import only_adds
from alpa_meta.token_slices.regions import BodyWriter
from alpa_meta.token_slices.scattering import write_scattered
from alpa_meta.token_slices.values import (
    BEFORE,
    Added,
    Analysis,
    Branches,
    KeyBlocks,
    Known,
    Region,
    Sliced,
    Value,
    joined_carry,
)
from alpa_meta.token_slices.writer import Writer

if TYPE_CHECKING:
    from alpa_meta.token_slices.analysis import Walk


def is_over_keys(walk: Walk, eqn: JaxprEqn, layouts: Sequence[Layout], sweep: int) -> bool:
    """Return whether a loop over blocks of tokens is one over blocks of keys: chosen where it may
    be one over blocks of queries as well."""
    num_consts, num_carry, _ = scan_counts(eqn)
    first = num_consts + num_carry
    inner = [*layouts[num_consts:first], *(one[1:] for one in layouts[first:])]
    if any(ROW in kinds(one) for one in inner) or any(
        KEY in kinds(one[:1]) for one in layouts[first:]
    ):
        return True
    if not any(map(any, (*layouts[:first], *inner))):
        return False
    in_order = bool(eqn.params["reverse"]) == (sweep != BEFORE)
    hands_on = in_order and not all(only_adds(eqn, k) for k in range(num_carry))
    names = ("queries", "keys") if hands_on else ("keys", "queries")
    kind = "loop over blocks", operator_signature(eqn), sweep
    return walk.choices.choose(names, kind) == "keys"


def key_loop(
    walk: Walk, eqn: JaxprEqn, operands: Sequence[Value], layouts: Sequence[Layout], sweep: int
) -> tuple[KeyBlocks, list[Value]]:
    """Return how a loop over blocks of keys runs in slices, and its results."""
    num_consts, num_carry, _ = scan_counts(eqn)
    first = num_consts + num_carry
    place = _place(walk, eqn, layouts[first:])
    jaxpr, carried = open_jaxpr(bodies(eqn)[0]), range(num_consts, first)
    fixed = [_as_given(value, layout) for value, layout in zip(operands[:num_consts], layouts)]
    pieces = []
    for atom, value, layout in zip(eqn.invars[first:], operands[first:], layouts[first:]):
        walk.check_read(atom, value, (place, *layout[1:]), sweep)
        pieces.append(evolve(_as_given(value, layout), layout=layout[1:], rest=None, later=None))
    starts = list(zip(eqn.invars[num_consts:first], operands[num_consts:first], strict=True))
    low = {k for k, start in enumerate(starts) if _is_low(walk, *start, sweep)}
    carry = [
        evolve(value, rest=None, later=None, longer=None, of_batch=False, dead=k in low)
        if value.in_parts
        else Value("known", whole(len(value.layout)), value.when)
        for k, (_, value) in enumerate(starts)
    ]
    outer = {v: eqn.invars[k] for k, v in enumerate(jaxpr.invars) if k not in carried}
    within = {
        v: _within(walk.scope, eqn.invars[k])
        for k, v in enumerate(jaxpr.invars)
        if k >= first and layouts[k][0] is not None
    }
    while True:
        inputs = [*fixed, *carry, *pieces]
        found = walk.body(eqn, 0, inputs, outer, sweep, carried, place, within).found
        after = [found.value(atom) for atom in jaxpr.outvars]
        joined = [joined_carry(*pair) for pair in zip(carry, after, strict=False)]
        joined = [
            evolve(value, dead=value.dead or k in low) if value.in_parts else value
            for k, value in enumerate(joined)
        ]
        if joined == carry:
            break
        carry = joined
    _check_body(found)
    made: list[Linear | None] = [None] * len(after)
    if walk.slices.count > 1:
        made = [*_later(walk, eqn, found, operands, low, sweep)]
    dead = {k for k in low if carry[k].in_parts and after[k].dead}
    if dead and walk.slices.count > 1:
        raise UnreadableError(
            "keeps the largest score of each token by blocks of keys, and a token all of whose "
            "keys are masked cannot be excluded; mask so that each token may look at itself"
        )
    results = []
    for k, (var, value) in enumerate(zip(eqn.outvars, carry, strict=False)):
        if value.in_parts and value.state == "addend" and not walk.inside:
            results.append(Value("known", value.layout, sweep + 1))
        elif value.in_parts:
            results.append(evolve(value, when=max(value.when, sweep), dead=k in dead))
        elif is_drop(var):
            results.append(value)
        else:
            raise UnreadableError("hands on from block to block of keys what is of no slice")
    given = [*carry]
    for atom, value, later in zip(jaxpr.outvars[num_carry:], after[num_carry:], made[num_carry:]):
        inner = value if value.in_parts else _as_read(found, atom, value)
        given.append(inner)
        results.append(_stacked(walk, inner, place, later, sweep))
    return KeyBlocks(found, num_consts, num_carry, place, tuple(given)), results


def _place(walk: Walk, eqn: JaxprEqn, layouts: Sequence[Layout]) -> Place:
    """Return the place of the blocks of keys that a loop runs over."""
    heads = {evolve(one[0], kind=KEY) for one in layouts if one[0] is not None}
    (place, *others) = heads
    plain = place.outer * place.inner == 1 and not place.after
    if others or not plain or eqn.params["length"] != walk.slices.cuts_of(place)[-1]:
        raise UnreadableError("scans over tokens merged with another dim")
    return place


def _as_given(value: Value, layout: Layout) -> Value:
    if value.in_parts:
        return evolve(value, longer=None)
    return evolve(value, layout=whole(len(layout)), longer=None)


def _is_low(walk: Walk, atom: Atom, value: Value, sweep: int) -> bool:
    """Return whether a loop may start from a value as low as a mask, which no gradient is."""
    if sweep != BEFORE and (value.in_parts or value.when != BEFORE):
        return False
    if value.in_parts:
        return value.dead
    return walk.masks.is_low(atom, whole(len(value.layout)), Own())


def _within(scope: Scope, atom: Atom) -> frozenset[int]:
    """Return the dims within a block that a body has of what it is given block by block: those that
    a reshape of the tokens made beside that of the blocks."""
    at: dict[int, int] = {d: d for d in range(len(shape_of(atom)))}
    while isinstance(atom, Var):
        eqn = scope.producer.get(atom)
        if atom in scope.outer and scope.parent is not None:
            if atom in scope.scanned:
                at = {d: held + 1 for d, held in at.items()}
            scope, atom = scope.parent, scope.outer[atom]
            continue
        rule = sharding_rule(eqn) if eqn is not None else None
        if eqn is None or rule is None or eqn.outvars[0] is not atom:
            break
        sources = [k for k, one in enumerate(eqn.invars) if isinstance(one, Var)]
        if is_elementwise(eqn):
            sources = [k for k in sources if shape_of(eqn.invars[k]) == shape_of(atom)][:1]
        if len(sources) != 1:
            break
        (source,) = sources
        made, read = rule.results[0], rule.operands[source]
        (head, *more) = made[at[0]] or ("",)
        for dim in read:
            if len(dim) == 2 and dim[0] == head and not more:
                return frozenset(d - 1 for d, held in at.items() if made[held] == (dim[1],))
        places = {dim: d for d, dim in enumerate(read) if dim}
        at = {d: places[made[held]] for d, held in at.items() if made[held] in places}
        if 0 not in at:
            break
        atom = eqn.invars[source]
    return frozenset()


def _check_body(found: Analysis) -> None:
    """Raise UnreadableError for a body in which a slice needs what another slice's made."""
    eqns = open_jaxpr(found.closed).eqns
    given = {*open_jaxpr(found.closed).invars}
    for eqn, decision in zip(eqns, found.decisions, strict=True):
        if isinstance(decision, Sliced):
            for atom, layout in zip(eqn.invars, decision.reading.operands, strict=True):
                value = found.value(atom)
                looks_back = KEY in kinds(layout) and KEY not in kinds(value.layout)
                if value.in_parts and looks_back and atom not in given:
                    raise UnreadableError("looks back on tokens inside a loop over blocks of keys")
            if any(map(decision.reading.scatters, range(len(eqn.outvars)))):
                raise UnreadableError("looks back on tokens inside a loop over blocks of keys")
        elif isinstance(decision, Region):
            _check_body(decision.body)
        elif isinstance(decision, Branches):
            for body in decision.bodies:
                _check_body(body)
        elif not isinstance(decision, Known | Added):
            raise UnreadableError("runs along tokens inside a loop over blocks of keys")


def _later(
    walk: Walk,
    eqn: JaxprEqn,
    found: Analysis,
    operands: Sequence[Value],
    low: set[int],
    sweep: int,
) -> list[Linear]:
    """Return what the body makes in the blocks behind a slice; UnreadableError unless that leaves
    what it hands on alone."""
    num_consts, num_carry, _ = scan_counts(eqn)
    first, jaxpr, unknowns = num_consts + num_carry, open_jaxpr(found.closed), walk.unknowns
    given: dict[Var, Linear] = {}
    for k, (var, atom) in enumerate(zip(jaxpr.invars, eqn.invars, strict=True)):
        if not found.value(var).in_parts:
            continue
        if num_consts <= k < first:
            key, live = ("carry", eqn, k), k - num_consts in low
            given[var] = linear(unknowns.of(key, var, steady=True, live=live))
        elif k < first:
            given[var] = linear(unknowns.of(("given", atom), var, steady=True))
        else:
            given[var] = _piece(unknowns, eqn, k, operands[k])
    handed_on = jaxpr.outvars[:num_carry] if sweep == BEFORE else None
    made = in_later_blocks(found, given, unknowns, handed_on)
    for k, var in enumerate(jaxpr.invars[num_consts:first]):
        if var in given and made[k] != given[var]:
            raise UnreadableError(
                "reads tokens after its own, which no mask was proved to leave out (a later block "
                f"of keys must leave what the loop hands on as it is, and changes number {k} of it)"
            )
    return made


def _piece(unknowns: Unknowns, eqn: JaxprEqn, number: int, value: Value) -> Linear:
    """Return what a loop is given of a later block."""
    if value.later is not None:
        return linear(value.later)
    if value.rest is not None and KEY in kinds(value.layout[:1]):
        return Linear(value.rest)
    atom = eqn.invars[number]
    return linear(unknowns.of(("block", eqn, number), atom))


def _as_read(found: Analysis, atom: Atom, value: Value) -> Value:
    """Return what a slice keeps of a known value that the loop stacks: what the body reads of
    it."""
    layouts = [
        layout
        for eqn, decision in zip(open_jaxpr(found.closed).eqns, found.decisions, strict=True)
        if isinstance(decision, Sliced)
        for one, layout in zip(eqn.invars, decision.reading.operands, strict=True)
        if one is atom and any(layout)
    ]
    layout = layouts[0] if layouts else whole(len(value.layout))
    assert found.scope is not None
    return Value("sliced", layout, value.when)


def _stacked(walk: Walk, value: Value, place: Place, later: Linear | None, sweep: int) -> Value:
    """Return what is known of what a loop stacks."""
    if value.state == "addend":
        if sweep == BEFORE:
            raise UnreadableError("gives later tokens a part in earlier ones")
        if later is not None and later.number != 0.0:
            raise UnreadableError(
                "adds to the gradients of tokens after its own, which no mask was proved to leave "
                "out"
            )
        return Value("sliced", (evolve(place, kind=ROW), *value.layout), sweep)
    if KEY in kinds(value.layout):
        raise UnreadableError("meets the keys of the tokens in two dims")
    alone = later.alone if later is not None else None
    return Value(
        "sliced",
        (place, *value.layout),
        max(value.when, sweep),
        rest=None if later is None else later.number,
        dead=value.dead,
        later=alone if alone is not None and alone.steady else None,
    )


class _KeyBlockWriter(BodyWriter):
    """Writes the loops of all slices over the blocks of keys up to their ends."""

    def __init__(self, parent: Writer, eqn: JaxprEqn, blocks: KeyBlocks) -> None:
        self.blocks = blocks
        region = Region(blocks.body, blocks.num_consts, blocks.num_carry, True)
        super().__init__(parent, eqn, region)

    def outer_layout(self, var: Var, layout: Layout) -> Layout:
        """Return the layout outside of what a body reads."""
        return (self.blocks.place, *layout) if var in self.from_scan else layout

    def value_of(self, k: int) -> Value:
        """Return what is known of a result of the body."""
        return self.blocks.results[k]

    def outside(self, k: int, number: int) -> Var | None:
        """Return the variable outside for a result of a slice's loop."""
        var, value = self.eqn.outvars[k], self.value_of(k)
        if k < self.blocks.num_carry:
            return super().outside(k, number)
        made = self.parent.result(var, (self.blocks.place, *value.layout), number)
        if value.state == "addend" and not is_drop(var):
            self.sums_made.append((var, made, number))
        elif not is_drop(var):
            self.parent.parts[var, number] = made
        return made

    def add_up(self, var: Var, made: Var, number: int) -> None:
        """Add a slice's part of the gradients of keys, or of a carry that is a sum."""
        k = self.eqn.outvars.index(var)
        if k < self.blocks.num_carry:
            super().add_up(var, made, number)
        else:
            layout = (self.blocks.place, *self.value_of(k).layout)
            write_scattered(self.parent, var, layout, made, number)

    def loop(self, number: int) -> JaxprEqn:
        """Return the loop over the blocks up to a slice's end."""
        start, stop = self.slices.held(self.blocks.place, number)
        eqn: JaxprEqn = self.eqn.replace(params={**self.eqn.params, "length": stop - start})
        return eqn


def write_key_blocks(parent: Writer, eqn: JaxprEqn, blocks: KeyBlocks) -> None:
    """Write a loop over blocks of keys for all slices."""
    writer = _KeyBlockWriter(parent, eqn, blocks)
    writer.write()
    writer.finish()
