"""How recomputations, scans over layers and conditionals run in token slices: their bodies are
walked with what is known of their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_of, open_jaxpr, scan_counts
from alpa_meta.operators import operator_of
from alpa_meta.operators.layout import is_unspecified
from alpa_meta.operators.regions import bodies, fold
from alpa_meta.token_slices.blocks import block_loop
from alpa_meta.token_slices.bounds import Own
from alpa_meta.token_slices.key_blocks import is_over_keys, key_loop
from alpa_meta.token_slices.mask_facts import diagonal
from alpa_meta.token_slices.masking import of_any
from alpa_meta.token_slices.places import whole
from alpa_meta.token_slices.reading import UnreadableError
from alpa_meta.token_slices.recurrences import token_loop
from alpa_meta.token_slices.values import (
    Branches,
    Decision,
    Region,
    Value,
    joined_carry,
)

if TYPE_CHECKING:
    from alpa_meta.token_slices.analysis import Walk


def region(
    walk: Walk, eqn: JaxprEqn, operands: Sequence[Value], sweep: int
) -> tuple[Decision, list[Value]]:
    """Return how a region runs in slices, and what is known of its results."""
    return fold(
        eqn,
        scan=lambda: _scan(walk, eqn, operands, sweep),
        loop=_refuse_loop,
        branches=lambda: _branches(walk, eqn, operands, sweep),
        remat=lambda: _remat(walk, eqn, operands, sweep),
    )


def _refuse_loop() -> NoReturn:
    raise UnreadableError("runs tokens through a while loop: use `lax.scan` or `lax.fori_loop`")


def _remat(
    walk: Walk, eqn: JaxprEqn, operands: Sequence[Value], sweep: int
) -> tuple[Decision, list[Value]]:
    jaxpr = open_jaxpr(bodies(eqn)[0])
    inputs = [_as_input(value) for value in operands]
    outer = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    found = walk.body(eqn, 0, inputs, outer, sweep, within=walk.masks.within_of(outer))
    walk.masks.within.update(found.masks.within_of(dict(zip(eqn.outvars, jaxpr.outvars))))
    results = [_leaving(walk, found.found.value(atom), sweep) for atom in jaxpr.outvars]
    return Region(found.found, len(inputs), 0, False), results


def _as_input(value: Value) -> Value:
    return (
        value
        if value.in_parts or value.of_batch
        else evolve(value, layout=whole(len(value.layout)))
    )


def _leaving(walk: Walk, value: Value, sweep: int) -> Value:
    """Return what a result is outside the body."""
    if value.state == "addend" and not walk.inside:
        return Value("known", value.layout, sweep + 1)
    when = max(value.when, sweep) if value.in_parts else value.when  # also of what was given
    return evolve(value, when=when, of_batch=False, longer=None)


def _scan(
    walk: Walk, eqn: JaxprEqn, operands: Sequence[Value], sweep: int
) -> tuple[Decision, list[Value]]:
    num_consts, num_carry, _ = scan_counts(eqn)
    first = num_consts + num_carry
    scanned = operands[first:]
    layouts = walk.layouts(operands)
    if any(layout[0] is not None for layout in layouts[first:]):
        if is_over_keys(walk, eqn, layouts, sweep):
            return key_loop(walk, eqn, operands, layouts, sweep)
        if any(any(layout) for layout in (*layouts[:first], *(one[1:] for one in layouts[first:]))):
            return block_loop(walk, eqn, operands, layouts, sweep)
        read = walk.read if walk.inside else None
        loop, after = token_loop(eqn, layouts, walk.slices, sweep, read)
        return walk.again(eqn, operands, loop, after, sweep)
    jaxpr = open_jaxpr(bodies(eqn)[0])
    fixed = [_as_input(value) for value in operands[:num_consts]]
    pieces = [evolve(value, layout=value.layout[1:], longer=None) for value in scanned]
    carry = [
        evolve(value, rest=None, later=None, longer=None, of_batch=False, layout=layout)
        if value.in_parts
        else Value("known", whole(len(value.layout)), value.when)
        for value, layout in zip(operands[num_consts:first], layouts[num_consts:first], strict=True)
    ]
    carried = range(num_consts, first)
    outer = {v: eqn.invars[k] for k, v in enumerate(jaxpr.invars) if k not in carried}
    while True:
        found = walk.body(eqn, 0, [*fixed, *carry, *pieces], outer, sweep, carried).found
        after = [found.value(atom) for atom in jaxpr.outvars[:num_carry]]
        joined = [joined_carry(*pair) for pair in zip(carry, after, strict=True)]
        if joined == carry:
            break
        carry = joined
    results = [_leaving(walk, found.value(atom), sweep) for atom in jaxpr.outvars]
    results[:num_carry] = [
        Value("known", value.layout, sweep + 1)
        if value.state == "addend" and not walk.inside
        else value
        for value in carry
    ]
    stacked = [evolve(value, layout=(None, *value.layout)) for value in results[num_carry:]]
    return Region(found, num_consts, num_carry, True), [*results[:num_carry], *stacked]


def _branches(
    walk: Walk, eqn: JaxprEqn, operands: Sequence[Value], sweep: int
) -> tuple[Decision, list[Value]]:
    index, *given = operands
    if index.in_parts:
        raise UnreadableError("takes a branch that depends on the tokens of a slice")
    inputs, walks = [_as_input(value) for value in given], []
    for number, body in enumerate(bodies(eqn)):
        outer = dict(zip(open_jaxpr(body).invars, eqn.invars[1:], strict=True))
        within = walk.masks.within_of(outer)
        walks.append(walk.body(eqn, number, inputs, outer, sweep, within=within))
    made = [*zip(*(open_jaxpr(one.found.closed).outvars for one in walks), strict=True)]
    own = walk.scope.bounds(eqn.invars[0], (), Own()).constant if walk.scope.in_blocks else None
    values = tuple(_of_either(walks, atoms, own) for atoms in made)
    for var, atoms in zip(eqn.outvars, made, strict=True):
        walk.scope.made_in.pop(var, None)  # by one of several
        if len(only := _specified(walks, atoms)) == 1:
            walk.scope.made_in[var] = only[0][0].scope, only[0][1], False
    results = [_leaving(walk, value, sweep) for value in values]
    return Branches(tuple(one.found for one in walks), values), results


def _of_either(walks: Sequence[Walk], atoms: Sequence[Atom], taken: float | None) -> Value:
    """Return what is known of a result that one of several branches makes; `taken` is that of each
    token's own block. What a branch leaves unspecified, only its own gradient is given, which does
    not read it."""
    made = _specified(walks, atoms)
    values = [walk.found.value(atom) for walk, atom in made] or [walks[0].found.value(atoms[0])]
    parts = [value for value in values if value.in_parts]
    first = (parts or values)[0]
    when, layout = max(value.when for value in values), first.layout
    if not parts:
        return Value("known", whole(len(layout)), when)
    if {(value.state, value.layout) for value in parts} != {(first.state, layout)}:
        raise UnreadableError("has branches that hold the tokens of a result in different dims")
    if first.state == "addend":
        return Value("addend", layout, when, why=first.why)
    rests, dead = [], False
    for (walk, atom), value in zip(made, values, strict=True):
        rests.append(walk.masks.operand_rest(atom, value, layout))
        own = None if walk.scope.in_blocks else diagonal([layout], walk.slices)
        if taken is None or walk is walks[min(max(int(taken), 0), len(walks) - 1)]:
            dead = dead or walk.masks.is_low(atom, layout, own)
    return Value("sliced", layout, when, rest=of_any(rests, dtype_of(atoms[0])), dead=dead)


def _specified(walks: Sequence[Walk], atoms: Sequence[Atom]) -> list[tuple[Walk, Atom]]:
    return [pair for pair in zip(walks, atoms, strict=True) if not _is_unspecified(*pair)]


def _is_unspecified(walk: Walk, atom: Atom) -> bool:
    eqn = None if isinstance(atom, Literal) else walk.scope.producer.get(atom)
    while eqn is not None and operator_of(eqn).layout and isinstance(eqn.invars[0], Var):
        eqn = walk.scope.producer.get(eqn.invars[0])
    return eqn is not None and is_unspecified(eqn)
