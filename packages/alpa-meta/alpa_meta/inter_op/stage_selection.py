"""The selection problem of one stage of a staged program, and what its solution costs and holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import frozen

from alpa_meta.compat import Literal, Var, is_drop, shape_of
from alpa_meta.execution.accumulation import crossing_values
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.inter_op.split_backward import by_weight, kept_for_weights
from alpa_meta.inter_op.staging import Staging
from alpa_meta.inter_op.window import Window
from alpa_meta.intra_op.folding import fold_keys
from alpa_meta.intra_op.liveness import KINDS
from alpa_meta.intra_op.memory_profile import Peak
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import Selection, build
from alpa_meta.intra_op.stage_problem import StageEqns
from alpa_meta.pinning import Pin
from alpa_meta.step.program import Program


@frozen(eq=False)
class StageScope:
    """The equations of one stage with what the builder needs, and value roles for accounting."""

    eqns: StageEqns
    layers: tuple[int | None, ...]
    residuals: frozenset[Var]  # forward values the backward pass reads
    boundary_out: frozenset[Var]  # values the next stages read
    by_weight: frozenset[int] | None = None  # positions of what a split backward delays


def stage_scope(
    program: Program,
    staging: Staging,
    stage: int,
    in_flight: int,
    pins: Mapping[Var, Pin] | None = None,
    apart: bool = False,
    window: Window | None = None,
    num_delayed: int = 0,
) -> StageScope:
    """Return the scope of `stage`, with `in_flight` microbatches of activations alive.

    `num_delayed` of them wait for their backward by weight. `apart`: the forward pass is to be a
    program of its own, as it is where there are more stages. `window`: `staging` is the window's,
    whose equations count more than once.
    """
    members = [k for k, home in enumerate(staging.stages) if home == stage]
    eqns = [staging.eqns[k] for k in members]
    phases = [staging.phases[k] for k in members]
    layers = [staging.layers[k] for k in members]
    jaxpr = program.jaxpr
    defined = {var for eqn in eqns for var in eqn.outvars if not is_drop(var)}
    read = {a for eqn in eqns for a in eqn.invars if not isinstance(a, Literal)}
    state = {
        var
        for var, leaf in zip(jaxpr.invars, program.inputs, strict=True)
        if leaf.role == "state" and var in read
    }
    carried = [
        (atom, jaxpr.invars[alias])
        for atom, alias in zip(jaxpr.outvars, program.aliases, strict=True)
        if alias is not None and not isinstance(atom, Literal) and atom in defined
    ]
    forward = {
        var
        for eqn, phase in zip(eqns, phases, strict=True)
        if phase == "forward"
        for var in eqn.outvars
        if not is_drop(var)
    }
    residuals = frozenset(
        atom
        for eqn, phase in zip(eqns, phases, strict=True)
        if phase == "backward"
        for atom in eqn.invars
        if not isinstance(atom, Literal) and atom in forward
    )
    others = {
        atom
        for k, eqn in enumerate(staging.eqns)
        if staging.stages[k] != stage
        for atom in eqn.invars
        if not isinstance(atom, Literal)
    }
    others_made = {
        var
        for k, eqn in enumerate(staging.eqns)
        if staging.stages[k] != stage
        for var in eqn.outvars
    }
    crossing = crossing_values(staging, program)
    local_only = frozenset(
        var for var, readers in crossing.items() if var in defined and readers <= {stage}
    )
    later = None
    if staging.by_weight is not None:
        later = frozenset(at for at, k in enumerate(members) if k in staging.by_weight)
    stage_eqns = StageEqns(
        eqns=eqns,
        phases=phases,
        keys=fold_keys(eqns, phases, layers) if window is None else window.keys,
        state=frozenset(state),
        carried=carried,
        kept=residuals if apart or staging.num_stages > 1 else frozenset(),
        accumulated=local_only,
        num_microbatches=program.num_microbatches,
        in_flight=in_flight,
        delayed=kept_for_weights(eqns, phases, later or ()),
        num_delayed=num_delayed,
        received=frozenset((read & others_made) - defined),
        pins=pins or {},
        times=() if window is None else window.times,
        reads={} if window is None else window.reads,
    )
    sent = frozenset(defined & others)
    return StageScope(stage_eqns, tuple(layers), residuals, sent, later)


@frozen(eq=False)
class StageCosts:
    """What a choice of strategies costs, per layer: seconds per step, bytes per device."""

    forward: np.ndarray
    backward: np.ndarray
    by_weight: np.ndarray  # the part of `backward` that no other layer waits for
    update: np.ndarray
    state: np.ndarray
    gradients: np.ndarray
    activations: np.ndarray  # of one microbatch
    delayed: np.ndarray  # what one microbatch keeps besides for a delayed backward by weight
    transient: np.ndarray  # most temporaries at a time
    floor: np.ndarray  # [layers, 2] least seconds: microbatches, update
    peak: Peak  # of all layers together


def solved_costs(
    scope: StageScope,
    selection: Selection,
    choice: Sequence[int],
    num_layers: int,
    window: Window | None = None,
) -> StageCosts:
    """Return the costs of a choice by layer; equations without a layer count for layer 0.

    Of a `window`, layers that it left out cost what those that stand for them do.
    """
    mesh = selection.costs.mesh
    seconds = selection.node_layer_cost(choice)
    table = {name: np.zeros(num_layers) for name in ("forward", "backward", "update")}
    delayed, by_weight_seconds = _delayed(scope), np.zeros(num_layers)
    state, gradients = np.zeros(num_layers), np.zeros(num_layers)
    activations, transient = np.zeros(num_layers), np.zeros(num_layers)
    cotangents = np.zeros(num_layers)
    kept = kept_for_weights(scope.eqns.eqns, scope.eqns.phases, delayed)

    def local(var: Var, widened: bool = False) -> float:
        spec = selection.spec(var, choice)
        size = tensor_bytes(var)
        if widened:
            size = max(size, 4.0 * math.prod(shape_of(var)))
        return size / mesh.size(tuple(axis for dim in spec.dims for axis in dim))

    temporaries = selection.memory.usage(choice)[KINDS.index("temporaries")]
    working = np.zeros(0)
    if len(selection.times):
        working = np.maximum.reduceat(temporaries, np.array(selection.times))
    home = _state_layers(scope)
    for var in scope.eqns.state:
        state[home.get(var, 0)] += local(var)
    eqns, phases = scope.eqns.eqns, scope.eqns.phases
    for k, (eqn, phase, layer) in enumerate(zip(eqns, phases, scope.layers, strict=True)):
        place = layer or 0
        table[phase][place] += seconds[k]
        if k in delayed:
            by_weight_seconds[place] += seconds[k]
        transient[place] = max(transient[place], working[k])
        for var in eqn.outvars:
            if is_drop(var):
                continue
            if var in kept:
                cotangents[place] += local(var)
            if var in scope.residuals:
                activations[place] += local(var)
            if var in scope.eqns.accumulated:
                gradients[place] += local(var, widened=True)
    for phase, more in selection.traffic.extra(choice).items():
        table[phase] += more / num_layers
    floors = least_costs(scope, selection, num_layers)
    forth = back = np.arange(num_layers)
    if window is not None:
        forth, back = np.array(window.layer_of).T
    return StageCosts(
        table["forward"][forth],
        table["backward"][back],
        by_weight_seconds[back],
        table["update"][back],
        state[back],
        gradients[back],
        activations[back],
        cotangents[back],
        transient[back],
        floors[back],
        selection.memory.peak(choice),
    )


def _delayed(scope: StageScope) -> frozenset[int]:
    """Return the positions of the equations that a split backward runs later, of one that is not
    split what it would be where a stage began with any of its layers.
    """
    if scope.by_weight is not None:
        return scope.by_weight
    return by_weight(scope.eqns.eqns, scope.eqns.phases, scope.layers, scope.boundary_out)


def _state_layers(scope: StageScope) -> dict[Var, int]:
    """Return the layer of each state input: of the equation that replaces it, else of its
    reader."""
    produced = {
        var: layer
        for eqn, layer in zip(scope.eqns.eqns, scope.layers, strict=True)
        for var in eqn.outvars
        if layer is not None
    }
    home = {old: produced[new] for new, old in scope.eqns.carried if new in produced}
    for eqn, layer in zip(scope.eqns.eqns, scope.layers, strict=True):
        if layer is not None:
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    home.setdefault(atom, layer)
    return home


def least_costs(
    scope: StageScope, selection: Selection, num_layers: int, window: Window | None = None
) -> np.ndarray:
    """Return [layers, 2] seconds no choice can beat, of the microbatches and of the update.

    Each equation costs at least the least it costs under any of its strategies, without
    conversions.
    """
    least = selection.least_cost()
    floors = np.zeros((num_layers, 2))
    for k, (phase, layer) in enumerate(zip(scope.eqns.phases, scope.layers, strict=True)):
        floors[layer or 0, 1 if phase == "update" else 0] += least[k]
    if window is not None:
        floors = floors[[back for _, back in window.layer_of]]
    return floors


def boundary_bytes(program: Program, staging: Staging, num_layers: int) -> np.ndarray:
    """Return [layers] bytes of one microbatch crossing from layer k or below to above it,
    forward."""
    made: dict[Var, int] = {}
    last: dict[Var, int] = {}
    for eqn, phase, layer in zip(staging.eqns, staging.phases, staging.layers, strict=True):
        if phase != "forward" or layer is None:
            continue
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and atom in made:
                last[atom] = max(last.get(atom, 0), layer)
        for var in eqn.outvars:
            made[var] = layer
    crossing = np.zeros(num_layers)
    for var, stop in last.items():
        crossing[made[var] : stop] += tensor_bytes(var)
    return crossing


__all__ = [
    "MeshCosts",
    "StageCosts",
    "StageScope",
    "boundary_bytes",
    "build",
    "solved_costs",
    "stage_scope",
]
