"""A value that several operators read, each in a sharding of its own choice, is read once for all.

Where two or more such operators of one pass and one token slice read a value, an operator
`alpa_read` is put in front of the first, which does nothing; they read its result. So the planner
may choose one sharding for all of them: the value is converted once, is priced once, and takes
memory until the last has read it. The gradient of a matrix product's result, say, is read by the
products for both its operands. Token slices are programs of their own in a pipeline, and would
hand the result from one to the next: a copy of every weight that stays as long as they do.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

import jax
from attrs import evolve
from jax.extend.core import Primitive
from jax.interpreters import mlir

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    consts,
    is_plain,
    open_jaxpr,
    shape_of,
)
from alpa_meta.microbatch.placement import Placement
from alpa_meta.operators import is_heavy
from alpa_meta.operators.regions import is_control_flow, with_bodies
from alpa_meta.passes.flat_program import FlatProgram

Group = tuple[str, int | None]
"""The pass and the token slice of an equation: those of others may be another program."""

_read_p = Primitive("alpa_read")
_read_p.def_impl(lambda x: x)
_read_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_read_p, lambda _, x: [x])


def is_shared_read(eqn: JaxprEqn) -> bool:
    """Return whether an equation only reads a value on behalf of several others."""
    return eqn.primitive is _read_p


def with_shared_reads(program: FlatProgram) -> FlatProgram:
    """Return the program with shared reads, which have the placements of what they read."""
    jaxpr, placements = open_jaxpr(program.closed), dict(program.placements)
    groups = [
        (phase, program.slice_of.get(eqn.outvars[0]) if eqn.outvars else None)
        for eqn, phase in zip(jaxpr.eqns, program.phases, strict=True)
    ]
    pairs = list(_shared(jaxpr.eqns, groups, placements))
    flat = ClosedJaxpr(jaxpr.replace(eqns=[eqn for eqn, _ in pairs]), consts(program.closed))
    phases = tuple(phase for _, (phase, _) in pairs)
    return evolve(program, closed=flat, phases=phases, placements=placements)


def _shared(
    eqns: Sequence[JaxprEqn], groups: Iterable[Group], placements: dict[Var, Placement]
) -> Iterator[tuple[JaxprEqn, Group]]:
    """Yield equations with shared reads among them, and the groups that share them."""
    pairs = list(zip(eqns, groups, strict=False))
    readers = Counter((var, group) for eqn, group in pairs for var in _choosing(eqn))
    shared: dict[tuple[Atom, Group], Var] = {}
    for eqn, group in pairs:
        for var in _choosing(eqn):
            if readers[var, group] > 1 and (var, group) not in shared:
                result = shared[var, group] = Var(var.aval)
                yield read_once(var, result, eqn), group
                if var in placements:
                    placements[result] = placements[var]
        eqn = with_bodies(eqn, _in_body)
        if _chooses(eqn):
            eqn = eqn.replace(
                invars=[
                    a if isinstance(a, Literal) else shared.get((a, group), a) for a in eqn.invars
                ]
            )
        yield eqn, group


def _choosing(eqn: JaxprEqn) -> Iterator[Var]:
    """Yield the variables that an equation reads in shardings of its own choice."""
    if _chooses(eqn):
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and shape_of(atom) and is_plain(atom):
                yield atom


def _chooses(eqn: JaxprEqn) -> bool:
    return is_heavy(eqn) or is_control_flow(eqn)


def read_once(var: Atom, result: Var, reader: JaxprEqn) -> JaxprEqn:
    """Return an equation that reads `var` on behalf of several others, of the line of `reader`."""
    read: JaxprEqn = _template().replace(
        invars=[var], outvars=[result], source_info=reader.source_info
    )
    return read


@functools.lru_cache(maxsize=1)
def _template() -> JaxprEqn:
    eqn: JaxprEqn
    (eqn,) = open_jaxpr(jax.make_jaxpr(_read_p.bind)(0.0)).eqns
    return eqn


def _in_body(body: ClosedJaxpr) -> ClosedJaxpr:
    """Return the body of a region with shared reads."""
    jaxpr = open_jaxpr(body)
    eqns = [eqn for eqn, _ in _shared(jaxpr.eqns, repeat(("", None)), {})]
    return ClosedJaxpr(jaxpr.replace(eqns=eqns), consts(body))
