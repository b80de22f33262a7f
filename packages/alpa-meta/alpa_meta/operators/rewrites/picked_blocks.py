"""Blocks that a loop picks by its number are given to it one by one.

    for i:  f(dynamic_slice(x, i B, B))            is   scan f over the blocks of x
    for i:  x += dynamic_update_slice(0, y, i B)   is   scan y, and x + all y behind one another

where the blocks are all of x, as in attention by blocks written with `lax.fori_loop`, and its
gradient. So is the number of the iteration that a loop counts itself: the operators in a loop then
say which tokens they are of, and a gradient is not added up in full for each block of it. What a
recomputation picks so is picked in front of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from attrs import define, field
from jax import lax
from jax.extend.core import jaxpr_as_fun

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    array_type,
    consts,
    dtype_of,
    is_drop,
    open_jaxpr,
    scan_counts,
    shape_of,
    subjaxprs,
)
from alpa_meta.operators.elementwise import is_sum
from alpa_meta.operators.intervals import Interval, holds_exactly
from alpa_meta.operators.regions import bodies, scan_of, with_bodies
from alpa_meta.operators.registry import operator_of
from alpa_meta.operators.rewrites.counting import (
    counted,
    counts,
    is_by_element,
    is_integer,
    result_of_numbers,
)
from alpa_meta.operators.rewrites.replacement import replacement
from alpa_meta.operators.rewrites.rewrite import Origins, Rewrite, with_rewrite
from alpa_meta.types import Function

_PICKS, _PUTS = "dynamic_slice", "dynamic_update_slice"


def _scanned(eqn: JaxprEqn, origins: Origins) -> list[JaxprEqn] | None:
    """Return a scan that is given its blocks; None if it picks none."""
    sunk = _counted_inside(eqn, origins, scan_counts(eqn)[0])
    loop = _Loop(sunk or eqn, origins)
    loop.changed = sunk is not None
    loop.pick()
    loop.put()
    loop.count()
    loop.tidy()
    return loop.written()


@define(eq=False)
class _Body:
    """The parts of a scan's body that change: its inputs and results beside those outside."""

    fixed: list[tuple[Var, Atom]]
    carry: list[tuple[Var, Atom, Atom, Var]]  # input, start, result, and its variable outside
    scanned: list[tuple[Var, Atom]]
    stacked: list[tuple[Atom, Var]]
    before: list[JaxprEqn] = field(factory=list)
    after: list[JaxprEqn] = field(factory=list)


class _Loop:
    """A scan that is rewritten."""

    def __init__(self, eqn: JaxprEqn, origins: Origins) -> None:
        self.eqn, self.origins = eqn, origins
        self.changed = False
        self.closed = bodies(eqn)[0]
        jaxpr, (num_consts, num_carry, _) = open_jaxpr(self.closed), scan_counts(eqn)
        first = num_consts + num_carry
        self.length = int(eqn.params["length"])
        inputs = list(zip(jaxpr.invars, eqn.invars, strict=True))
        results = list(zip(jaxpr.outvars, eqn.outvars, strict=True))
        pairs = zip(inputs[num_consts:first], results[:num_carry], strict=True)
        carry = [(var, start, made, out) for (var, start), (made, out) in pairs]
        self.body = _Body(inputs[:num_consts], carry, inputs[first:], results[num_carry:])
        self.eqns = list(jaxpr.eqns)
        self.makers = {var: one for one in self.eqns for var in one.outvars}
        self.numbers = self._numbers()

    def _numbers(self) -> dict[Var, Interval]:
        """Return what is a number plus a multiple of the number of the iteration."""
        found: dict[Var, Interval] = {}
        for var, atom in self.body.scanned:
            if shape_of(var) == () and jnp.issubdtype(dtype_of(var), jnp.integer):
                held = counts(atom, self.origins)
                if held is not None:
                    found[var] = held
        for var, start, made, _ in self.body.carry:
            step = self._step(var, made)
            if step is not None and isinstance(start, Literal) and not self.eqn.params["reverse"]:
                begin = float(start.val)
                ends = begin, begin + step * self.length
                if all(holds_exactly(dtype_of(var), end) for end in ends):  # else it wraps around
                    found[var] = Interval(begin, begin, step, self.length - 1)
        for one in self.eqns:
            held = result_of_numbers(one, found)
            if held is not None:
                found[one.outvars[0]] = held
        return found

    def _step(self, var: Var, made: Atom) -> float | None:
        """Return what a carry is counted up by; None if it is none."""
        one = None if isinstance(made, Literal) else self.makers.get(made)
        if one is None or not is_sum(one) or shape_of(var) != ():
            return None
        if not jnp.issubdtype(dtype_of(var), jnp.integer):
            return None
        steps = [atom for atom in one.invars if isinstance(atom, Literal)]
        return float(steps[0].val) if len(steps) == 1 and var in one.invars else None

    def _block(
        self, starts: Sequence[Atom], block: Sequence[int], whole: Sequence[int]
    ) -> int | None:
        """Return the dim that blocks cut, if those of all iterations are all of a tensor."""
        cut = [d for d, (part, size) in enumerate(zip(block, whole, strict=True)) if part < size]
        if len(cut) != 1 or block[cut[0]] * self.length != whole[cut[0]]:
            return None
        start = starts[cut[0]]
        held = None if isinstance(start, Literal) else self.numbers.get(start)
        if held is None or (held.low, held.high, held.slope) != (0.0, 0.0, float(block[cut[0]])):
            return None
        return cut[0]

    def pick(self) -> None:
        """Give the loop the blocks that it picks."""
        outside = dict(self.body.fixed)
        for one in self.eqns:
            source = one.invars[0] if one.primitive.name == _PICKS else None
            if source not in outside or isinstance(outside[source], Literal):
                continue
            (piece,) = one.outvars
            dim = self._block(one.invars[1:], shape_of(piece), shape_of(source))
            if dim is None or is_drop(piece):
                continue
            given = Var(array_type(piece).update(shape=(self.length, *shape_of(piece))))
            cut = _cut(dim, self.length)
            self.body.before += replacement(cut, [outside[source]], [given], one)
            self.body.scanned.append((piece, given))
            self._drop(one)

    def put(self) -> None:
        """Stack the blocks that the loop adds to a carry."""
        readers = Counter(atom for one in self.eqns for atom in one.invars if isinstance(atom, Var))
        results = [row[2] for row in self.body.carry] + [atom for atom, _ in self.body.stacked]
        readers.update(atom for atom in results if isinstance(atom, Var))
        for k, (var, start, made, out) in enumerate(self.body.carry):
            terms, sums = self._terms(made, readers)
            if var not in terms or readers[var] > 1 or not sums:
                continue
            puts = {
                term: dim
                for term in terms
                if isinstance(term, Var) and (dim := self._put_dim(term, readers)) is not None
            }
            if not puts:
                continue
            kept = [term for term in terms if term not in puts]
            where = self.eqns.index(sums[0])
            for one in sums:
                self._drop(one)
            held: Atom = kept[0]
            for term in kept[1:]:
                after = Var(array_type(var))
                self.eqns.insert(where, sums[0].replace(invars=[held, term], outvars=[after]))
                held, where = after, where + 1
            total, result = start, out
            if len(kept) > 1:  # what is no put is added up in the loop
                total = result = Var(array_type(out))
            self.body.carry[k] = (var, start, held, result)
            for term, dim in puts.items():
                block = self.makers[term].invars[1]
                given = Var(array_type(block).update(shape=(self.length, *shape_of(block))))
                self.body.stacked.append((block, given))
                after = out if term is list(puts)[-1] else Var(array_type(out))
                operands = [given] if _is_zero(total, self.origins) else [total, given]
                self.body.after += replacement(_put(dim), operands, [after], self.eqn)
                total = after
        self.body.carry = [
            row for row in self.body.carry if row[0] is not row[2] or self._read(row)
        ]

    def _read(self, row: tuple[Var, Atom, Atom, Var]) -> bool:
        """Return whether a carry that comes back as it is has to stay."""
        var, _, _, out = row
        read = any(atom is var for one in self.eqns for atom in one.invars)
        made = {v for one in self.body.after for v in one.outvars}
        return read or out not in made

    def _terms(self, made: Atom, readers: Counter[Var]) -> tuple[list[Atom], list[JaxprEqn]]:
        """Return what is added up to a result, and the sums, those made last first."""
        terms, sums, pending = [], [], [made]
        while pending:
            atom = pending.pop()
            one = self.makers.get(atom) if isinstance(atom, Var) and readers[atom] == 1 else None
            if one is not None and is_sum(one):
                sums.append(one)
                pending += one.invars
            else:
                terms.append(atom)
        return terms, sums

    def _put_dim(self, term: Var, readers: Counter[Var]) -> int | None:
        one = self.makers.get(term)
        if one is None or one.primitive.name != _PUTS or readers[term] > 1:
            return None
        background, block, *starts = one.invars
        if not _is_zero(background, Origins(self.makers, {})) or isinstance(block, Literal):
            return None
        return self._block(starts, shape_of(block), shape_of(term))

    def count(self) -> None:
        """Give the loop the numbers that it counts, and leave out those that it hands on."""
        kept = []
        for row in self.body.carry:
            var, _, _, out = row
            held = self.numbers.get(var)
            if held is None or any(var is one for one, _ in self.body.scanned):
                kept.append(row)
                continue
            given = Var(array_type(var).update(shape=(self.length,)))
            self.body.before += replacement(counted(held, given), [], [given], self.eqn)
            self.body.scanned.append((var, given))
            if not is_drop(out):
                last = held.low + held.slope * self.length
                self.body.after += replacement(_one(last, out), [], [out], self.eqn)
            self.changed = True
        self.body.carry = kept
        given_at, stacked = dict(self.body.scanned), []
        for atom, out in self.body.stacked:
            held = None if isinstance(atom, Literal) else self.numbers.get(atom)
            if not is_drop(out) and atom in given_at:
                self.body.after += replacement(lambda x: x, [given_at[atom]], [out], self.eqn)
                self.changed = True
            elif not is_drop(out) and held is not None and dtype_of(out) != np.bool_:
                self.body.after += replacement(counted(held, out), [], [out], self.eqn)
                self.changed = True
            elif (places := self._places(atom, out)) is not None:
                self.body.after += places
                self.changed = True
            else:
                stacked.append((atom, out))
        self.body.stacked = stacked

    def _places(self, atom: Atom, out: Var) -> list[JaxprEqn] | None:
        """Return the equations of what a loop stacks, if that is made element by element of
        integers that it is given, as the places of the tokens of a block are."""
        if is_drop(out) or isinstance(atom, Literal) or dtype_of(atom) == np.bool_:
            return None
        eqns = _live(self.eqns, [atom])
        read = {a for one in eqns for a in one.invars if isinstance(a, Var)}
        made = {var for one in eqns for var in one.outvars}
        given: list[tuple[Var, Atom, int | None]] = []
        given += [(v, a, None) for v, a in self.body.fixed if v in read]
        given += [(v, a, 0) for v, a in self.body.scanned if v in read]
        if not all(map(is_integer, (atom, *(v for v, *_ in given)))) or not eqns:
            return None
        if read - made - {v for v, *_ in given} or not all(map(is_by_element, eqns)):
            return None
        jaxpr = open_jaxpr(self.closed)
        inner = jaxpr.replace(
            invars=[v for v, *_ in given],
            outvars=[atom],
            eqns=eqns,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        run = jaxpr_as_fun(ClosedJaxpr(inner, consts(self.closed)))
        axes = [axis for *_, axis in given]
        if 0 not in axes:
            return None
        run = jax.vmap(run, axes, 0, axis_size=self.length)
        return replacement(run, [a for _, a, _ in given], [out], self.eqn)

    def _drop(self, one: JaxprEqn) -> None:
        self.eqns = [other for other in self.eqns if other is not one]
        self.changed = True

    def tidy(self) -> None:
        """Leave out what nobody reads."""
        body = self.body
        results = [*(row[2] for row in body.carry), *(atom for atom, _ in body.stacked)]
        eqns = _live(self.eqns, results)
        read = {atom for one in eqns for atom in one.invars if isinstance(atom, Var)}
        read |= {atom for atom in results if isinstance(atom, Var)}
        scanned = [(var, atom) for var, atom in body.scanned if var in read]
        self.changed = self.changed or len(scanned) < len(body.scanned)
        body.fixed = [(var, atom) for var, atom in body.fixed if var in read]
        body.scanned, self.eqns = scanned, eqns

    def _is_at_once(self) -> bool:
        """Return whether all that is done is to lay elements out, or to make each result element by
        element of integers alone, as masks are."""
        given = [*self.body.fixed, *self.body.scanned]
        numbers = all(is_integer(var) for var, _ in given)
        alike = all(operator_of(one).layout or numbers and is_by_element(one) for one in self.eqns)
        return alike and bool(self.body.scanned) and not self.body.carry

    def written(self) -> list[JaxprEqn] | None:
        """Return the equations of the scan as it is now; None if it is what it was."""
        body, jaxpr = self.body, open_jaxpr(self.closed)
        counts = self._is_at_once()
        if not self.changed and not counts:
            return None
        fixed, carry = body.fixed, body.carry
        inner = jaxpr.replace(
            invars=[
                *(v for v, _ in fixed),
                *(row[0] for row in carry),
                *(v for v, _ in body.scanned),
            ],
            outvars=[*(row[2] for row in carry), *(atom for atom, _ in body.stacked)],
            eqns=self.eqns,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        made = ClosedJaxpr(inner, consts(self.closed))
        operands = [
            *(a for _, a in fixed),
            *(row[1] for row in carry),
            *(a for _, a in body.scanned),
        ]
        results = [*(row[3] for row in carry), *(out for _, out in body.stacked)]
        run: Function[object] = scan_of(self.eqn, made, len(fixed), len(carry))
        if counts:
            axes = [None] * len(fixed) + [0] * len(body.scanned)
            run = jax.vmap(jaxpr_as_fun(made), axes, 0, axis_size=self.length)
        return [*body.before, *replacement(run, operands, results, self.eqn), *body.after]


def _counted_inside(eqn: JaxprEqn, origins: Origins, num: int) -> JaxprEqn | None:
    """Return a region whose regions count for themselves the numbers that it is given by the first
    `num` operands, and pick by those; None if it is given none."""
    closed = bodies(eqn)[0]
    jaxpr = open_jaxpr(closed)
    read = {a for one in jaxpr.eqns if subjaxprs(one) for a in one.invars if isinstance(a, Var)}
    invars, eqns = list(jaxpr.invars), list(jaxpr.eqns)
    for k, (var, atom) in enumerate(list(zip(jaxpr.invars, eqn.invars, strict=True))[:num]):
        held = counts(atom, origins) if var in read else None
        if held is not None and jnp.issubdtype(dtype_of(var), jnp.integer):
            invars[k] = Var(array_type(var))
            eqns[:0] = replacement(counted(held, var), [], [var], eqn)
    if len(eqns) == len(jaxpr.eqns):
        return None
    made = ClosedJaxpr(jaxpr.replace(invars=invars, eqns=eqns), consts(closed))
    for rewrite in (BLOCKS_OF_RECOMPUTATIONS, PICKED_BLOCKS):
        made = with_rewrite(made, rewrite)
    found: JaxprEqn = with_bodies(eqn, lambda _: made)
    return found


def _is_zero(atom: Atom, origins: Origins) -> bool:
    """Return whether a value is 0 everywhere."""
    if isinstance(atom, Literal):
        return not np.any(atom.val)
    one = origins.eqn(atom)
    return (
        one is not None
        and one.primitive.name == "broadcast_in_dim"
        and (_is_zero(one.invars[0], origins))
    )


def _cut(dim: int, length: int) -> Callable[[jax.Array], jax.Array]:
    def run(value: jax.Array) -> jax.Array:
        sizes = (*value.shape[:dim], length, value.shape[dim] // length, *value.shape[dim + 1 :])
        order = (dim, *(d for d in range(value.ndim + 1) if d != dim))
        return lax.transpose(lax.reshape(value, sizes), order)

    return run


def _put(dim: int) -> Function[jax.Array]:
    """Return a function that puts blocks behind one another, and adds them to what there is."""

    def run(*values: jax.Array) -> jax.Array:
        blocks = values[-1]
        order = [*range(1, dim + 1), 0, *range(dim + 1, blocks.ndim)]
        sizes = list(blocks.shape[1:])
        sizes[dim] *= blocks.shape[0]
        found = lax.reshape(lax.transpose(blocks, order), sizes)
        return lax.add(values[0], found) if len(values) > 1 else found

    return run


def _one(value: float, var: Var) -> Callable[[], jax.Array]:
    return lambda: lax.full((), value, dtype_of(var))


# ------------------------------------------------------------------ recomputations


def _recomputed(eqn: JaxprEqn, origins: Origins) -> list[JaxprEqn] | None:
    """Return a recomputation that is given what it picks, and whose results others put in place;
    None if it does neither."""
    sunk = _counted_inside(eqn, origins, len(eqn.invars))
    eqn = sunk or eqn
    closed = bodies(eqn)[0]
    jaxpr = open_jaxpr(closed)
    outside: dict[Var, Atom] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    before: list[JaxprEqn] = []
    for one in jaxpr.eqns:  # the numbers that the blocks are picked by
        small = all(shape_of(a) == () for a in (*one.invars, *one.outvars))
        whole = all(map(is_integer, (*one.invars, *one.outvars)))
        if (
            small
            and whole
            and _is_given(one.invars, outside)
            and not (one.effects or subjaxprs(one))
        ):
            made = [Var(var.aval) for var in one.outvars]
            before.append(_outside(one, outside, made))
            outside.update(zip(one.outvars, made, strict=True))
    eqns, given, invars = [], [], list(jaxpr.invars)
    for one in jaxpr.eqns:
        picks = one.primitive.name == _PICKS and not all(
            isinstance(a, Literal) for a in one.invars[1:]
        )
        if picks and one.invars[0] in outside and _is_given(one.invars, outside):
            (piece,) = one.outvars
            made = [Var(piece.aval)]
            before.append(_outside(one, outside, made))
            invars.append(piece)
            given += made
        else:
            eqns.append(one)
    makers = {var: one for one in eqns for var in one.outvars}
    outvars, results, after = list(jaxpr.outvars), list(eqn.outvars), []
    for k, (atom, var) in enumerate(zip(jaxpr.outvars, eqn.outvars, strict=True)):
        last = None if isinstance(atom, Literal) else makers.get(atom)
        if last is None or last.primitive.name != _PUTS or is_drop(var):
            continue
        background, block, *starts = last.invars
        zeros = makers.get(background) if isinstance(background, Var) else None
        literal = zeros is not None and all(isinstance(a, Literal) for a in zeros.invars)
        if zeros is None or not literal or not _is_zero(background, Origins(makers, {})):
            continue
        if isinstance(block, Literal) or not _is_given(starts, outside):
            continue
        outvars[k], results[k] = block, Var(block.aval)
        blank = Var(background.aval)
        after.append(zeros.replace(outvars=[blank]))
        places = [a if isinstance(a, Literal) else outside[a] for a in starts]
        after.append(last.replace(invars=[blank, results[k], *places], outvars=[var]))
    if not given and not after:
        return None if sunk is None else [sunk]
    inner = jaxpr.replace(
        invars=invars,
        outvars=outvars,
        eqns=_live(eqns, outvars),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    changed = with_bodies(eqn, lambda _: ClosedJaxpr(inner, consts(closed)))
    return [*before, changed.replace(invars=[*eqn.invars, *given], outvars=results), *after]


def _live(eqns: Sequence[JaxprEqn], outvars: Sequence[Atom]) -> list[JaxprEqn]:
    needed = {atom for atom in outvars if isinstance(atom, Var)}
    kept = []
    for one in reversed(eqns):
        if one.effects or any(var in needed for var in one.outvars):
            kept.append(one)
            needed.update(atom for atom in one.invars if isinstance(atom, Var))
    return kept[::-1]


def _is_given(atoms: Sequence[Atom], outside: dict[Var, Atom]) -> bool:
    return all(isinstance(atom, Literal) or atom in outside for atom in atoms)


def _outside(one: JaxprEqn, outside: dict[Var, Atom], made: Sequence[Var]) -> JaxprEqn:
    """Return an equation of a body as it is outside."""
    operands = [atom if isinstance(atom, Literal) else outside[atom] for atom in one.invars]
    found: JaxprEqn = one.replace(invars=operands, outvars=list(made))
    return found


BLOCKS_OF_RECOMPUTATIONS = Rewrite(frozenset({"remat", "remat2", "checkpoint"}), _recomputed)
PICKED_BLOCKS = Rewrite(frozenset({"scan"}), _scanned)
