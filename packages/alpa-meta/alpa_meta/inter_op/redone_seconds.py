"""What equations take in layers that recompute: the first time, and once more.

What the backward pass makes again need not be in memory after the forward pass: the kernels that
read it compute it, the first time and, where only such kernels read it, the second time too
(`fused_traffic`). The forward pass of a transformer's layer that redoes its scores and norms takes
a tenth less than of one that keeps them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve, frozen

from alpa_meta.compat import JaxprEqn, Literal, Var
from alpa_meta.inter_op.recomputation import clones_of_layers
from alpa_meta.inter_op.scope_facts import ScopeFacts, redone_of
from alpa_meta.intra_op.equation_seconds import EquationSeconds, Priced
from alpa_meta.intra_op.fused_traffic import Bytes, fused_traffic
from alpa_meta.intra_op.operator_seconds import compute_seconds
from alpa_meta.intra_op.other_sizes import OtherSizes, others_of
from alpa_meta.intra_op.selection import Selection
from alpa_meta.intra_op.stage_problem import StageEqns
from alpa_meta.operators import sharding_rule
from alpa_meta.operators.regions import is_region


@frozen(eq=False)
class RedoneTraffic:
    """The bytes that equations move through memory, by position, where layers recompute."""

    first: Mapping[int, Bytes]
    again: Mapping[int, Bytes]


@functools.lru_cache(maxsize=64)  # scopes compare by identity, and are on many meshes
def redone_traffic(
    facts: ScopeFacts, kind: str, others: tuple[StageEqns, ...], platform: str, attends: bool
) -> RedoneTraffic:
    """Return what equations move where all layers recompute as `kind` says."""
    stage = facts.scope.eqns
    clones = clones_of_layers(stage.eqns, stage.phases, facts.scope.layers, kind)
    twins = others_of(stage, others)
    eqns: list[JaxprEqn] = []
    phases: list[str] = []
    first: dict[int, JaxprEqn] = {}
    again: dict[int, JaxprEqn] = {}
    for k, (eqn, phase, layer) in enumerate(
        zip(stage.eqns, stage.phases, facts.scope.layers, strict=True)
    ):
        own = None
        if phase == "backward" and layer is not None:
            own = clones.get(layer)
        found = [] if own is None else own.before(eqn)
        first[k] = eqn if own is None else own.reading(eqn)
        eqns += [*found, first[k]]
        phases += [phase] * (1 + len(found))
    values = dict(twins.values)
    for one in clones.values():
        again |= one.clones
        values |= {new: twins.values[old] for old, new in one.renamed if old in twins.values}
    pairs = [(eqn, stage.eqns[k]) for some in (first, again) for k, eqn in some.items()]
    theirs = {id(eqn): twins.eqns[id(old)] for eqn, old in pairs if id(old) in twins.eqns}
    for body in (one for one in twins.eqns if one not in theirs):  # of regions
        theirs[body] = twins.eqns[body]
    here = evolve(
        stage,
        eqns=eqns,
        phases=phases,
        keys=(None,) * len(eqns),
        kept=_read_later(eqns, phases) if stage.kept else frozenset(),
    )
    moved = fused_traffic(here, OtherSizes(theirs, values), platform, attends)
    return RedoneTraffic(
        {k: moved[id(eqn)] for k, eqn in first.items() if id(eqn) in moved},
        {k: moved[id(eqn)] for k, eqn in again.items() if id(eqn) in moved},
    )


def _read_later(eqns: Sequence[JaxprEqn], phases: Sequence[str]) -> frozenset[Var]:
    """Return the forward results that the backward pass reads."""
    made = {
        var
        for eqn, phase in zip(eqns, phases, strict=True)
        if phase == "forward"
        for var in eqn.outvars
    }
    return frozenset(
        atom
        for eqn, phase in zip(eqns, phases, strict=True)
        if phase == "backward"
        for atom in eqn.invars
        if not isinstance(atom, Literal) and atom in made
    )


class RedoneSeconds:
    """Seconds per step of a stage's equations where its layers recompute as one `kind` says.

    `seconds` are of twice as many equations: the first time, then once more; of "none" those of the
    selection. `first[k]` are those of entry k of the selection's `EquationSeconds.costs` the first
    time. `sizes` are the facts of the stage at the size of the selection, and at the others.
    """

    def __init__(self, selection: Selection, sizes: Sequence[ScopeFacts], kind: str) -> None:
        self.first: list[Priced] = [priced for _, _, priced in selection.seconds.costs]
        self.once_more: list[tuple[int, int, Priced]] = []  # position, node, [strategies] seconds
        self.seconds = selection.seconds
        if kind == "none":
            return
        facts, costs = sizes[0], selection.costs
        others = tuple(one.scope.eqns for one in sizes[1:])
        count = len(facts.scope.eqns.eqns)
        redone = set(redone_of(facts, kind).equations.tolist())
        traffic = redone_traffic(facts, kind, others, costs.platform, costs.attends)
        moving = _Moving(selection, sizes)
        for n, (position, node, priced) in enumerate(selection.seconds.costs):
            self.first[n] = moving.seconds(position, priced, traffic.first)
            if position in redone:
                more = moving.seconds(position, priced, traffic.again)
                self.once_more.append((position, node, more))
        firsts = zip(selection.seconds.costs, self.first, strict=True)
        entries = [(position, node, priced) for (position, node, _), priced in firsts]
        entries += [(count + position, node, priced) for position, node, priced in self.once_more]
        self.seconds = selection.seconds.with_again(entries, redone)


class _Moving:
    """Prices the equations of a selection where they move other bytes, remembered."""

    def __init__(self, selection: Selection, sizes: Sequence[ScopeFacts]) -> None:
        self._selection, self._sizes = selection, sizes
        self._known: dict[tuple[int, Bytes, Bytes], Priced] = {}
        stage, costs = sizes[0].scope.eqns, selection.costs
        self._twins = others_of(stage, tuple(one.scope.eqns for one in sizes[1:]))
        self._moved = fused_traffic(stage, self._twins, costs.platform, costs.attends)

    def seconds(self, position: int, priced: Priced, traffic: Mapping[int, Bytes]) -> Priced:
        """Return the seconds of an equation that moves the bytes of `traffic`."""
        stage = self._sizes[0].scope.eqns
        eqn, record = stage.eqns[position], self._selection.records[position]
        strategies = record.strategies
        if is_region(eqn) or position not in traffic or len(strategies) != len(priced[0]):
            return priced
        before, after = self._moved[id(eqn)], traffic[position]
        key = id(priced), before, after
        if before != after and key not in self._known:
            costs, rule = self._selection.costs, sharding_rule(eqn)
            found = []
            of = (eqn, *self._twins.eqns.get(id(eqn), ()))
            for seconds, one, facts, old, new in zip(
                priced, of, self._sizes, before, after, strict=False
            ):
                more = compute_seconds(costs, one, rule, strategies, new)
                more = more - compute_seconds(costs, one, rule, strategies, old)
                found.append(seconds + facts.scope.eqns.num_microbatches * more)
            self._known[key] = tuple(found)
        return priced if before == after else self._known[key]


def least_seconds(selection: Selection, kinds: Sequence[RedoneSeconds]) -> EquationSeconds:
    """Return the seconds of a stage's equations the first time, the least of all `kinds`."""
    seconds = selection.seconds
    known: dict[tuple[int, ...], Priced] = {}
    entries = []
    for n, (position, node, priced) in enumerate(seconds.costs):
        of = {id(kind.first[n]): kind.first[n] for kind in kinds}
        least = known.get(tuple(of))
        if least is None:
            least = known[tuple(of)] = (
                priced
                if len(of) == 1
                else tuple(np.minimum.reduce(sizes) for sizes in zip(*of.values(), strict=True))
            )
        entries.append((position, node, least))
    return seconds.with_costs(entries)
