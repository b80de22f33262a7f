"""What the equations of a stage are to its layers, whatever the mesh: phases, values held, reruns.

Costs of a choice of strategies on a mesh are added up by these facts.        -> layer_costs
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define, field, frozen

from alpa_meta.compat import JaxprEqn, Literal, Var, is_drop, shape_of
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.inter_op.recomputation import clones_of_layers
from alpa_meta.inter_op.split_backward import (
    by_weight_at_most,
    kept_for_weights,
    past_barriers,
    read_for_weights,
)
from alpa_meta.inter_op.stage_selection import StageScope
from alpa_meta.inter_op.staging import with_sunk_sums
from alpa_meta.intra_op.liveness import PHASES
from alpa_meta.program_caches import cached_by_program
from alpa_meta.step.program import Program
from alpa_meta.types import Flags, Ints

# What values are held as; those that wait are all that is held while a backward by weight does.
HELD = ("state", "gradients", "activations", "delayed", "waiting")


@define(eq=False)
class Held:
    """Values that layers hold: the layer and the bytes of each, whole."""

    values: list[Var] = field(factory=list)
    layers: list[int] = field(factory=list)
    sizes: list[float] = field(factory=list)

    def add(self, var: Var, layer: int, size: float | None = None) -> None:
        self.values.append(var)
        self.layers.append(layer)
        self.sizes.append(tensor_bytes(var) if size is None else size)


@frozen(eq=False)
class Redone:
    """What layers of one kind of recomputation run once more: positions of equations; and which
    results of the forward pass they keep or make again: positions and numbers of results.

    `lifetimes` [made again, 2]: positions of the first equation that needs it, of the last.
    """

    equations: Ints
    kept: tuple[tuple[int, int], ...]
    made_again: tuple[tuple[int, int], ...]
    lifetimes: Ints


@frozen(eq=False)
class ScopeFacts:
    """What the equations of a stage are, whatever the mesh."""

    scope: StageScope
    phases: Ints  # [equations] in PHASES
    layers: Ints  # [equations], 0 for those without a layer
    delayed: Flags  # [equations] whether a split backward runs them later

    @functools.cached_property
    def sunk(self) -> Flags:
        """[equations] Whether they run once a step where their layers are in several stages: sums
        of gradients of tied weights."""
        eqns = self.scope.eqns
        phases = with_sunk_sums(eqns.eqns, eqns.phases, self.scope.layers)
        pairs = zip(phases, eqns.phases, strict=True)
        return np.array([after != before for after, before in pairs], dtype=bool)

    @functools.cached_property
    def held(self) -> dict[str, Held]:
        """The values that layers hold, as what."""
        scope, found = self.scope, {name: Held() for name in HELD}
        home = state_layers(scope.eqns.eqns, scope.layers, scope.eqns.carried)
        read = (atom for eqn in scope.eqns.eqns for atom in eqn.invars)
        for var in dict.fromkeys(atom for atom in read if isinstance(atom, Var)):
            if var in scope.eqns.state and var not in scope.eqns.offloaded:
                found["state"].add(var, home.get(var, 0))
        delayed = frozenset(np.flatnonzero(self.delayed).tolist())
        kept = kept_for_weights(scope.eqns.eqns, scope.eqns.phases, delayed)
        late = read_for_weights(past_barriers(scope.eqns.eqns, delayed), delayed)
        for eqn, layer in zip(scope.eqns.eqns, self.layers.tolist(), strict=True):
            for var in eqn.outvars:
                if is_drop(var):
                    continue
                if var in kept:
                    found["delayed"].add(var, layer)
                if var in scope.residuals:
                    found["activations"].add(var, layer)
                if var in kept or var in scope.residuals and var in late:
                    found["waiting"].add(var, layer)
                if var in scope.eqns.accumulated:
                    widened = max(tensor_bytes(var), 4.0 * math.prod(shape_of(var)))
                    found["gradients"].add(var, layer, widened)
        return found

    def redone(self, kind: str) -> Redone:
        """Return what is run once more where all layers recompute as `kind` says."""
        eqns = self.scope.eqns
        clones = clones_of_layers(eqns.eqns, eqns.phases, self.scope.layers, kind)
        equations = sorted({k for one in clones.values() for k in one.redone})
        made = {var for k in equations for var in eqns.eqns[k].outvars}
        given = {var for one in clones.values() for var in one.given}
        alive = {v: ends for one in clones.values() for v, ends in one.lifetimes().items()}
        kept, again, lifetimes = [], [], []
        for k, (eqn, phase) in enumerate(zip(eqns.eqns, eqns.phases, strict=True)):
            for number, var in enumerate(eqn.outvars if phase == "forward" else ()):
                residual = var in self.scope.residuals
                if var in given or residual and var not in made:
                    kept.append((k, number))
                elif residual and var in alive:
                    again.append((k, number))
                    lifetimes.append(alive[var])
        positions = np.array(equations, dtype=np.int64)
        ends = np.array(lifetimes, dtype=np.int64).reshape(-1, 2)
        return Redone(positions, tuple(kept), tuple(again), ends)

    def held_at(self, places: Sequence[tuple[int, int]]) -> Held:
        """Return results, by the position of the equation and their number, as what layers
        hold."""
        found = Held()
        for k, number in places:
            found.add(self.scope.eqns.eqns[k].outvars[number], int(self.layers[k]))
        return found


@cached_by_program(32)  # scopes are on many meshes
def facts_of_scope(scope: StageScope) -> ScopeFacts:
    """Return the facts of a scope, remembered."""
    eqns = scope.eqns
    later = scope.by_weight
    if later is None:  # what it would be where a stage began with any of its layers
        phases = with_sunk_sums(eqns.eqns, eqns.phases, scope.layers)
        later = by_weight_at_most(eqns.eqns, phases, scope.layers, scope.boundary_out)
    delayed = np.zeros(len(eqns.eqns), dtype=bool)
    delayed[list(later)] = True
    numbers = np.array([PHASES.index(phase) for phase in eqns.phases], dtype=np.int64)
    layers = np.array([layer or 0 for layer in scope.layers], dtype=np.int64)
    return ScopeFacts(scope, numbers, layers, delayed)


@cached_by_program(64)
def redone_of(facts: ScopeFacts, kind: str) -> Redone:
    return facts.redone(kind)


def state_layers(
    eqns: Sequence[JaxprEqn], layers: Sequence[int | None], carried: Sequence[tuple[Var, Var]]
) -> dict[Var, int]:
    """Return the layer of each state input: of the equation that replaces it, else of its
    reader."""
    produced = {
        var: layer
        for eqn, layer in zip(eqns, layers, strict=True)
        for var in eqn.outvars
        if layer is not None
    }
    home = {old: produced[new] for new, old in carried if new in produced}
    for eqn, layer in zip(eqns, layers, strict=True):
        if layer is not None:
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    home.setdefault(atom, layer)
    return home


def state_by_layer(program: Program, home: Mapping[Var, int]) -> dict[int, list[Var]]:
    """Return the state inputs of each layer, in the program's order, by their layers (`home`)."""
    found: dict[int, list[Var]] = {}
    for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True):
        if leaf.role == "state" and var in home:
            found.setdefault(home[var], []).append(var)
    return found
