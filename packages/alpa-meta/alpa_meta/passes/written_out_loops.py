"""Loops of gradient accumulation written out: what is known of a round by its number is computed.

So is the round in front of a loop (`accumulate(1, n)` after the first part) like those inside, and
a condition on the first round no condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import jax
import numpy as np
from jax import Array

from alpa_meta import compat
from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    consts,
    is_drop,
    is_plain,
    open_jaxpr,
    scan_counts,
    shape_of,
    subjaxprs,
)
from alpa_meta.operators.regions import bodies, is_conditional, is_region, is_scan
from alpa_meta.passes.added_equations import equations_of
from alpa_meta.passes.own_values import put_together, value_of_round
from alpa_meta.step.phases import holds_gradient
from alpa_meta.step.trace import inline
from alpa_meta.types import HostArray

_MOST_EQUATIONS = 1 << 16
"""That a loop is written out as; a longer one stays a loop. 16,512 took 5 s of planning under a
profiler, more were not tried."""


def with_loops_written_out(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program with the rounds of its loops that hold gradients one after the other."""
    writer = _Writer(program)
    for eqn in program.jaxpr.eqns:
        eqn = eqn.replace(invars=[writer.read(atom) for atom in eqn.invars])
        if _can_be(eqn):
            writer.write_loop(eqn)
        else:
            writer.eqns.append(eqn)
    outvars = [writer.read(atom) for atom in program.jaxpr.outvars]
    jaxpr = program.jaxpr.replace(eqns=writer.eqns, outvars=outvars)
    return inline(ClosedJaxpr(jaxpr, program.consts)) if writer.found else program


def _can_be(eqn: JaxprEqn) -> bool:
    if not is_scan(eqn) or eqn.effects or not holds_gradient(eqn):
        return False
    (body,) = bodies(eqn)
    size = len(open_jaxpr(body).eqns) * int(eqn.params["length"])
    return size <= _MOST_EQUATIONS and not consts(body)


class _Writer:
    """Writes equations; `found` are the results of loops that have been written out."""

    def __init__(self, program: ClosedJaxpr) -> None:
        self.eqns: list[JaxprEqn] = []
        self.found: dict[Var, Atom] = {}
        self._makers = {var: eqn for eqn in program.jaxpr.eqns for var in eqn.outvars}

    def read(self, atom: Atom) -> Atom:
        """Return what is read instead of a value of the program."""
        return atom if isinstance(atom, Literal) else self.found.get(atom, atom)

    def write_loop(self, eqn: JaxprEqn) -> None:
        """Write all rounds of a scan."""
        num_consts, num_carry, _ = scan_counts(eqn)
        (closed,) = bodies(eqn)
        body, length = open_jaxpr(closed), eqn.params["length"]
        fixed, last = eqn.invars[:num_consts], num_consts + num_carry
        carry, scanned = eqn.invars[num_consts:last], eqn.invars[last:]
        known = [self._known(atom) if shape_of(atom) == (length,) else None for atom in scanned]
        made: dict[int, Sequence[Atom]] = {}
        for k in reversed(range(length)) if eqn.params["reverse"] else range(length):
            inner = body.invars[last:]
            parts = [self._part(*one, k) for one in zip(scanned, known, inner, strict=True)]
            given = dict(zip(body.invars, [*fixed, *carry, *parts], strict=True))
            results = self._write(body, given)
            carry, made[k] = results[:num_carry], results[num_carry:]
        self.found.update(zip(eqn.outvars, carry, strict=False))
        for place, var in enumerate(eqn.outvars[num_carry:]):
            if not is_drop(var):
                self.eqns += put_together(tuple(made[k][place] for k in range(length)), var)

    def _part(self, scanned: Atom, known: HostArray | None, like: Var, k: int) -> Atom:
        """Return what a round is given of a scanned array."""
        if known is not None:
            return Literal(known[k], like.aval)
        part = Var(like.aval)
        self.eqns += equations_of(value_of_round, [scanned], [part], k)
        return part

    def _write(self, body: Jaxpr, given: dict[Var, Atom]) -> list[Atom]:
        """Write the equations of a body for these operands; return its results."""

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else given[atom]

        for eqn in body.eqns:
            invars = [read(atom) for atom in eqn.invars]
            branch = self._branch(eqn, invars[0]) if is_conditional(eqn) else None
            if branch is not None:
                results = self._write(branch, dict(zip(branch.invars, invars[1:], strict=True)))
                given.update(zip(eqn.outvars, results, strict=True))
            elif _is_number(eqn, invars):
                literals = [atom for atom in invars if isinstance(atom, Literal)]
                values = _computed(eqn, [np.asarray(atom.val) for atom in literals])
                for var, value in zip(eqn.outvars, values, strict=True):
                    given[var] = Literal(value, var.aval)
            else:
                outvars = [var if is_drop(var) else Var(var.aval) for var in eqn.outvars]
                given.update(zip(eqn.outvars, outvars, strict=True))
                self.eqns.append(eqn.replace(invars=invars, outvars=outvars))
        return [read(atom) for atom in body.outvars]

    def _branch(self, eqn: JaxprEqn, taken: Atom) -> Jaxpr | None:
        """Return the branch that a condition takes, if that is known."""
        if not isinstance(taken, Literal):
            return None
        branches = bodies(eqn)
        branch = branches[min(max(int(taken.val), 0), len(branches) - 1)]
        return None if consts(branch) else open_jaxpr(branch)

    def _known(self, atom: Atom) -> HostArray | None:
        """Return the numbers that a value is, if it is computed of nothing else."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        maker = self._makers.get(atom)
        if maker is None or is_region(maker) or maker.effects or not is_plain(atom):
            return None
        known = [self._known(one) for one in maker.invars]
        operands = [one for one in known if one is not None]
        if len(operands) < len(known):
            return None
        value: HostArray = _computed(maker, operands)[maker.outvars.index(atom)]
        return value


def _is_number(eqn: JaxprEqn, invars: Sequence[Atom]) -> bool:
    """Return whether an equation computes numbers of known ones."""
    known = all(isinstance(atom, Literal) for atom in invars) and len(invars) > 0
    numbers = all(shape_of(var) == () and is_plain(var) for var in eqn.outvars)
    return known and numbers and not eqn.effects and not subjaxprs(eqn)


def _computed(eqn: JaxprEqn, operands: Sequence[HostArray]) -> list[HostArray]:
    with jax.ensure_compile_time_eval():
        return [np.asarray(one) for one in compat.bind(eqn, cast(list[Array], operands))]
