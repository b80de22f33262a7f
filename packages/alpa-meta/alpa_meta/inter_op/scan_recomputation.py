"""Recomputation of the layers of a scan: the backward scan redoes what the forward scan stacked.

    c, (ys, r) = scan(f, c, xs)              r: what the backward pass reads of each layer
    d = scan(b, d, (r, ..))                  becomes

    c, (ys, k) = scan(f', c, xs)             k: what each layer was given, or what is dear to redo
    d = scan(b', d, (k, xs, ..))             b' = b behind the clones that make r of k and xs

Only scans over layers (`stacks`): of a scan over time, a layer's clones contain it whole. Nothing
has to keep XLA from merging clones with the first run, which is in another loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar, cast

import jax
import numpy as np
from attrs import evolve
from jax import lax
from jax.extend.core import jaxpr_as_fun

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    array_type,
    closed,
    consts,
    dtype_of,
    is_drop,
    open_jaxpr,
    scan_counts,
    shape_of,
)
from alpa_meta.inter_op.layer_clones import LayerClones
from alpa_meta.inter_op.layering import Layering
from alpa_meta.inter_op.stacks import stacked_inputs, stacked_outputs
from alpa_meta.operators.regions import is_remat, is_scan
from alpa_meta.operators.rewrites.replacement import instantiated
from alpa_meta.passes.added_equations import equations_of, jaxpr_of
from alpa_meta.passes.live import live_eqns


def layer_scans(layering: Layering, layer: int, stacked: frozenset[Var]) -> list[JaxprEqn]:
    """Return the forward scans of `layer` over values that are `stacked` along layers."""
    return [
        eqn
        for eqn in layering.of("forward", layer)
        if is_scan(eqn)
        if any(atom in stacked for atom in stacked_inputs(eqn) if not isinstance(atom, Literal))
    ]


def own_recomputed(layering: Layering, layer: int) -> set[Var]:
    """Return the results of the forward scans of `layer` whose backward scans have recomputations
    of the user's own, which are left as they are, also where a scan is cut into single layers."""
    read = {
        atom
        for eqn in layering.of("backward", layer)
        if is_scan(eqn) and any(map(is_remat, open_jaxpr(eqn.params["jaxpr"]).eqns))
        for atom in eqn.invars
        if isinstance(atom, Var)
    }
    scans = (eqn for eqn in layering.of("forward", layer) if is_scan(eqn))
    return {var for eqn in scans if not read.isdisjoint(eqn.outvars) for var in eqn.outvars}


def with_recomputed_scan(
    layering: Layering, forward: JaxprEqn, layer: int, selective: bool, results: frozenset[Var]
) -> Layering:
    """Return the layering whose backward scan over the layers of `forward` redoes what it reads.

    `results` are the program's. Unchanged where no single backward scan of `layer` reads what
    `forward` stacks.
    """
    made = set(stacked_outputs(forward))
    readers = [
        eqn
        for eqn in layering.of("backward", layer)
        if is_scan(eqn)
        if made & {atom for atom in stacked_inputs(eqn) if not isinstance(atom, Literal)}
    ]
    if len(readers) != 1 or readers[0].params["length"] != forward.params["length"]:
        return layering
    (backward,) = readers
    bodies = [closed(eqn.params["jaxpr"]) for eqn in (forward, backward)]
    if any(consts(body) for body in bodies):
        return layering
    others = {
        atom
        for eqn in layering.eqns
        if eqn is not backward
        for atom in eqn.invars
        if not isinstance(atom, Literal)
    }
    pair = _Pair(forward, backward, selective)
    if not pair.redoes:
        return layering
    replaced = pair.replaced(frozenset(others | results))
    eqns: list[JaxprEqn] = []
    phases: list[str] = []
    layers: list[int | None] = []
    for eqn, phase, home in zip(layering.eqns, layering.phases, layering.layers, strict=True):
        found = replaced.get(eqn, [eqn])
        eqns += found
        phases += [phase] * len(found)
        layers += [home] * len(found)
    return evolve(layering, eqns=tuple(eqns), phases=tuple(phases), layers=tuple(layers))


class _Pair:
    """A forward scan over layers, and the backward scan that reads what it stacks.

    The bodies of both are taken for one layer's passes: the backward body reads the values of the
    forward body that it was given in stacks.
    """

    def __init__(self, forward: JaxprEqn, backward: JaxprEqn, selective: bool) -> None:
        self._forward, self._backward = forward, backward
        body, again = (open_jaxpr(closed(eqn.params["jaxpr"])) for eqn in (forward, backward))
        num_consts, num_carry, _ = scan_counts(backward)
        stacks = dict(self._stacks(body))
        self._operands = [  # of the backward body: its own variables, or those of the forward body
            stacks.get(outer, Var(inner.aval))
            if place >= num_consts + num_carry and isinstance(outer, Var)
            else Var(inner.aval)
            for place, (outer, inner) in enumerate(zip(backward.invars, again.invars, strict=True))
        ]
        self._own = set(self._operands) - set(stacks.values())
        self._results = [Var(atom.aval) for atom in again.outvars]
        reading = instantiated(again, self._operands, self._results)
        eqns = (*body.eqns, *reading)
        phases = ("forward",) * len(body.eqns) + ("backward",) * len(reading)
        layering = Layering(eqns, phases, (0,) * len(eqns), 1, (), ("none",))
        clones = LayerClones(layering, 0, selective, barrier=False)
        self._eqns = [
            made for eqn in reading for made in (*clones.before(eqn), clones.reading(eqn))
        ]
        self.redoes = len(self._eqns) > len(reading)

    def _stacks(self, body: Jaxpr) -> list[tuple[Var, Var]]:
        """Return (stacked value, value of the body) of what the forward scan stacks."""
        pairs = zip(self._forward.outvars, body.outvars, strict=True)
        return [
            (outer, inner)
            for outer, inner in list(pairs)[scan_counts(self._forward)[1] :]
            if isinstance(inner, Var) and not is_drop(outer)
        ]

    def replaced(self, others: Collection[Var]) -> dict[JaxprEqn, list[JaxprEqn]]:
        """Return {scan: what replaces it}; `others` are read by more than the two."""
        forward, body = self._forward, open_jaxpr(closed(self._forward.params["jaxpr"]))
        fixed, carry, scanned = _split(forward, body.invars)
        made = {var for eqn in self._eqns for var in eqn.outvars}
        read = dict.fromkeys(
            atom
            for eqn in self._eqns
            for atom in eqn.invars
            if isinstance(atom, Var) and atom not in made
        )
        wanted = [var for var in read if var not in self._own | {*fixed, *scanned}]
        ys = list(zip(forward.outvars, body.outvars, strict=True))[len(carry) :]
        stays = [(o, i) for o, i in ys if not is_drop(o) and (o in others or i in wanted)]
        stacks = {inner: outer for outer, inner in stays if isinstance(inner, Var)}
        for var in wanted:
            if var not in stacks:
                shape = (forward.params["length"], *shape_of(var))
                stacks[var] = Var(array_type(var).update(shape=shape))
                stays.append((stacks[var], var))
        results = [*body.outvars[: len(carry)], *(inner for _, inner in stays)]
        first = jaxpr_of(body, [], body.invars, results, live_eqns(body.eqns, results))
        outer = [*forward.outvars[: len(carry)], *(stack for stack, _ in stays)]
        return {
            forward: _scan(forward, first, _split(forward, forward.invars), outer),
            self._backward: self._second(body, fixed, scanned, wanted, stacks, read),
        }

    def _second(
        self,
        body: Jaxpr,
        fixed: Sequence[Var],
        scanned: Sequence[Var],
        wanted: Sequence[Var],
        stacks: Mapping[Var, Var],
        read: Collection[Var],
    ) -> list[JaxprEqn]:
        """Return the backward scan that makes again what it read in stacks."""
        backward, given = self._backward, dict(zip(body.invars, self._forward.invars, strict=True))
        inner, outer = _split(backward, self._operands), _split(backward, backward.invars)
        pairs = [(v, a) for v, a in zip(inner[2], outer[2], strict=True) if v in self._own]
        pairs += [(var, stacks[var]) for var in wanted]
        pairs += [(var, given[var]) for var in scanned if var in read]
        consts = [(var, given[var]) for var in fixed if var in read]
        invars = [*inner[0], *(v for v, _ in consts), *inner[1], *(v for v, _ in pairs)]
        operands = (
            [*outer[0], *(atom for _, atom in consts)],
            outer[1],
            [atom for _, atom in pairs],
        )
        again = jaxpr_of(body, [], invars, self._results, self._eqns)
        return _scan(backward, again, operands, backward.outvars)


T = TypeVar("T")


def _split(eqn: JaxprEqn, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Return constants, carries and scanned ones of what stands for the operands of a scan."""
    num_consts, num_carry, _ = scan_counts(eqn)
    first = num_consts + num_carry
    return list(values[:num_consts]), list(values[num_consts:first]), list(values[first:])


def _scan(
    like: JaxprEqn,
    body: Jaxpr,
    operands: tuple[Sequence[Atom], Sequence[Atom], Sequence[Atom]],
    results: Sequence[Var],
) -> list[JaxprEqn]:
    """Return equations for a scan of `body` over (constants, carries, scanned) like another."""
    run = jaxpr_as_fun(ClosedJaxpr(body, ()))
    read = list(dict.fromkeys(a for part in operands for a in part if isinstance(a, Var)))
    num_carry = len(operands[1])

    def scanned(*given: jax.Array) -> list[jax.Array]:
        known = dict(zip(read, given, strict=True))

        def value(atom: Atom) -> jax.Array:
            if isinstance(atom, Var):
                return known[atom]
            return cast(jax.Array, np.asarray(atom.val, dtype_of(atom)))

        consts, carry, xs = (tuple(map(value, part)) for part in operands)

        def step(
            state: tuple[jax.Array, ...], slices: tuple[jax.Array, ...]
        ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
            outputs = run(*consts, *state, *slices)
            return tuple(outputs[:num_carry]), tuple(outputs[num_carry:])

        params = {name: like.params[name] for name in ("length", "reverse", "unroll")}
        state, ys = lax.scan(step, carry, xs, **params)
        return [*state, *ys]

    return equations_of(scanned, read, results)
