"""Loops of gradient accumulation that a step has of its own: all their rounds at once.

Many training steps add gradients up in a loop over parts of the batch, to save memory on one
device. Inside a loop neither stages nor microbatches can be cut, so that it is undone, and the
planner chooses how many microbatches there are:

    scan(round, (sum, key), parts)   is   sum + reduce_sum(vmap(round)(keys, parts))

where a round adds to some of what it carries and reads none of that, and the rest of what it
carries depends on no part (a counter, a key that is split for every round): that stays a loop of
its own, whose values before each round are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import jax
from attrs import frozen
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    consts,
    open_jaxpr,
    scan_counts,
    with_eqns,
)
from alpa_meta.microbatch.example_dims import example_dims
from alpa_meta.microbatch.placement import Placement
from alpa_meta.operators.elementwise import addends, is_sum
from alpa_meta.operators.random import draws_alike_mapped
from alpa_meta.operators.regions import bodies, is_scan
from alpa_meta.passes.added_equations import equations_of, jaxpr_of
from alpa_meta.passes.batch_parts import parts_by_rounds
from alpa_meta.passes.equal_rounds import with_equal_rounds_at_once
from alpa_meta.passes.live import live_eqns
from alpa_meta.passes.written_out_loops import with_loops_written_out
from alpa_meta.step.phases import holds_gradient
from alpa_meta.step.trace import inline
from alpa_meta.types import Function


def with_rounds_at_once(
    program: ClosedJaxpr, inputs: Sequence[Placement | None]
) -> Iterator[tuple[ClosedJaxpr, int]]:
    """Yield programs of the same results without gradient accumulation, and how many parts of the
    batch it had: without its loops, and with what is written out at once, loops among it.

    `inputs` are the placements of what has examples, None of other inputs.
    """
    loops = _without_loops(program)
    if loops is not None:
        yield loops
    written_out = with_loops_written_out(program)
    by_rounds = parts_by_rounds(written_out)
    examples = example_dims(written_out, inputs) if by_rounds else {}
    for rounds, parts in by_rounds.items():
        of_batch = [one for one in parts if one.whole in examples]
        found = with_equal_rounds_at_once(written_out, of_batch) if of_batch else None
        if found is not None:
            yield inline(found), rounds


def _without_loops(program: ClosedJaxpr) -> tuple[ClosedJaxpr, int] | None:
    """Return the program without loops whose rounds may run at once, and how many parts of the
    batch they had, the most that several have in common; None where there is none."""
    eqns: list[JaxprEqn] = []
    rounds = 0
    for eqn in program.jaxpr.eqns:
        loop = _loop(eqn) if is_scan(eqn) and holds_gradient(eqn) else None
        if loop is None:
            eqns.append(eqn)
        else:
            eqns += loop.at_once()
            rounds = math.gcd(rounds, eqn.params["length"])
    return (inline(with_eqns(program, eqns)), rounds) if rounds else None


@frozen(eq=False)
class _Loop:
    """A loop whose rounds do not depend on one another, but for carries of their own.

    `terms` are what a round adds, by the number of the carry; `own` the carries that depend on no
    part, of which `steady` never change.
    """

    eqn: JaxprEqn
    body: Jaxpr
    terms: Mapping[int, Sequence[Atom]]
    own: Sequence[int]
    steady: Sequence[int]

    def at_once(self) -> list[JaxprEqn]:
        """Return equations for all the rounds."""
        return equations_of(self._run, self.eqn.invars, self.eqn.outvars)

    def _run(self, *values: Array) -> list[Array]:
        num_consts, num_carry, _ = scan_counts(self.eqn)
        last = num_consts + num_carry
        first = values[num_consts:last]  # the carries
        after, before = self._carried(values[:num_consts], [first[k] for k in self.own])
        steady = [first[k] for k in self.steady]
        fixed = (*values[:num_consts], *steady)
        read = [*self.body.invars[:num_consts], *(self._carries[k] for k in self.steady)]
        mapped = (*before, *values[last:])
        changing = [self._carries[k] for k in self.own if k not in self.steady]
        read += [*changing, *self.body.invars[last:]]
        terms = [(k, term) for k, some in self.terms.items() for term in some]
        results = [term for _, term in terms] + self.body.outvars[num_carry:]
        dims = (*[None] * len(fixed), *[0] * len(mapped))
        every_round = jax.vmap(
            self._part(read, results), in_axes=dims, axis_size=self.eqn.params["length"]
        )
        made = every_round(*fixed, *mapped)
        carried = list(first)
        for k, own in zip(self.own, after, strict=True):
            carried[k] = own
        for (k, _), term in zip(terms, made, strict=False):
            carried[k] = lax.add(carried[k], lax.reduce_sum(term, (0,)))
        return [*carried, *made[len(terms) :]]

    def _carried(
        self, fixed: Sequence[Array], first: Sequence[Array]
    ) -> tuple[Sequence[Array], Sequence[Array]]:
        """Return what the loop's own carries are in the end, and those that change before each
        round."""
        changing = [place for place, k in enumerate(self.own) if k not in self.steady]
        if not changing:
            return first, ()
        num_consts, num_carry, _ = scan_counts(self.eqn)
        own = [self._carries[k] for k in self.own]
        step = self._part(
            [*self.body.invars[:num_consts], *own], [self.body.outvars[k] for k in self.own]
        )

        def trip(carry: tuple[Array, ...], _: None) -> tuple[tuple[Array, ...], list[Array]]:
            return tuple(step(*fixed, *carry)), [carry[place] for place in changing]

        params = self.eqn.params
        after, before = lax.scan(
            trip, tuple(first), None, length=params["length"], reverse=params["reverse"]
        )
        return after, before

    @property
    def _carries(self) -> Sequence[Var]:
        num_consts, num_carry, _ = scan_counts(self.eqn)
        return self.body.invars[num_consts : num_consts + num_carry]

    def _part(self, invars: Sequence[Var], outvars: Sequence[Atom]) -> Function[list[Array]]:
        """Return the part of a round that makes some values, as a function."""
        eqns = live_eqns(self.body.eqns, outvars)
        part = ClosedJaxpr(jaxpr_of(self.body, [], invars, outvars, eqns), ())
        function: Function[list[Array]] = jaxpr_as_fun(part)
        return function


def _loop(eqn: JaxprEqn) -> _Loop | None:
    """Return a scan as a loop whose rounds may run at once, None if they may not."""
    (closed,) = bodies(eqn)
    body = open_jaxpr(closed)
    num_consts, num_carry, _ = scan_counts(eqn)
    if eqn.effects or consts(closed) or not draws_alike_mapped(eqn):
        return None
    carries = body.invars[num_consts : num_consts + num_carry]
    depends = _inputs_of(body)
    own = set(range(num_carry))
    fixed = set(body.invars[:num_consts])
    while True:
        given = fixed | {carries[k] for k in own}
        kept = {k for k in own if _of(body.outvars[k], depends) <= given}
        if kept == own:
            break
        own = kept
    terms: dict[int, Sequence[Atom]] = {}
    for k in set(range(num_carry)) - own:
        added = _added(body, carries[k], body.outvars[k])
        if added is None:
            return None
        terms[k] = added
    steady = [k for k in sorted(own) if body.outvars[k] is carries[k]]
    return _Loop(eqn, body, terms, sorted(own), steady) if terms else None


def _added(body: Jaxpr, carry: Var, after: Atom) -> Sequence[Atom] | None:
    """Return what a round adds to a carry that it does nothing else with, None otherwise."""
    readers: dict[Atom, list[JaxprEqn | None]] = {}
    for eqn in body.eqns:
        for atom in eqn.invars:
            if isinstance(atom, Var):
                readers.setdefault(atom, []).append(eqn)
    for atom in body.outvars:
        if isinstance(atom, Var):
            readers.setdefault(atom, []).append(None)
    found: list[Atom] = []
    value = carry
    while True:
        (reader, *others) = readers.get(value, [None])
        if others:
            return None
        if reader is None:
            return found if value is after else None
        if is_sum(reader):
            found += [atom for atom in reader.invars if atom is not value]
        elif len(reader.invars) > 1 or not addends(reader):
            return None
        value = reader.outvars[0]


def _inputs_of(body: Jaxpr) -> Mapping[Var, frozenset[Var]]:
    """Return the inputs that each value of a body depends on."""
    found: dict[Var, frozenset[Var]] = {var: frozenset((var,)) for var in body.invars}
    for eqn in body.eqns:
        together = frozenset().union(*(_of(atom, found) for atom in eqn.invars))
        found.update((var, together) for var in eqn.outvars)
    return found


def _of(atom: Atom, inputs: Mapping[Var, frozenset[Var]]) -> frozenset[Var]:
    return frozenset() if isinstance(atom, Literal) else inputs[atom]
