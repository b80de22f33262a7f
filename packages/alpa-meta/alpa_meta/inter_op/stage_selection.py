"""What the selection problem of one stage of a staged program is made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from attrs import frozen

from alpa_meta.compat import JaxprEqn, Literal, Var, is_drop, shape_of
from alpa_meta.execution.accumulation import crossing_values
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.inter_op.split_backward import kept_for_weights
from alpa_meta.inter_op.staging import Staging
from alpa_meta.inter_op.window import Window
from alpa_meta.intra_op.folding import fold_keys
from alpa_meta.intra_op.liveness import PHASES
from alpa_meta.intra_op.stage_problem import StageEqns
from alpa_meta.pinning import Pin
from alpa_meta.step.program import Program
from alpa_meta.types import Floats

# Forwards that a stage runs while one that comes after it makes a cotangent, by the seconds that
# order the runs of a pipeline (`stage_dp.schedules.NOMINAL_SECONDS`: a backward takes two of them).
# No emitted program of 1,500 random pipelines held more.
BACK = 3


@frozen(eq=False)
class StageScope:
    """The equations of one stage with what the builder needs, and value roles for accounting."""

    eqns: StageEqns
    layers: tuple[int | None, ...]
    residuals: frozenset[Var]  # forward values the backward pass reads
    boundary_out: frozenset[Var]  # values the next stages read
    members: tuple[int, ...] = ()  # positions of the equations in the staging
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
    slices: Sequence[int] = (),
    early: Sequence[int] = (),
) -> StageScope:
    """Return the scope of `stage`, with `in_flight` microbatches of activations alive.

    `num_delayed` of them wait for their backward by weight. `apart`: the forward pass is to be a
    program of its own, as it is where there are more stages. `window`: `staging` is the window's,
    whose equations count more than once. `slices`: of which token slice each equation of `staging`
    is, where its stages are programs of their own; the stage's equations are then in the order that
    these run in. `early`: the microbatches in flight of all stages, where transfers are received
    when they are sent.
    """
    members = list(staging.positions.get(stage, []))
    if slices:
        members.sort(key=lambda k: _task(staging, slices, k))
        window = window and window.ordered(members)
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
    offloaded = frozenset(
        var
        for var, leaf in zip(jaxpr.invars, program.inputs, strict=True)
        if leaf.memory != "device" and var in read
    )
    carried = [
        (atom, jaxpr.invars[alias])
        for atom, alias in zip(jaxpr.outvars, program.aliases, strict=True)
        if alias is not None
        and not isinstance(atom, Literal)
        and atom in defined
        # of state with an entry per example, a microbatch makes a part, which is joined to others
        and shape_of(atom) == shape_of(jaxpr.invars[alias])
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
    crossing = crossing_values(staging, program)
    local_only = frozenset(
        var for var, readers in crossing.items() if var in defined and readers <= {stage}
    )
    sent = frozenset(var for var in defined if staging.readers.get(var, set()) - {stage})
    received = frozenset(var for var in read if staging.makers.get(var, stage) != stage)
    later = None
    if staging.by_weight is not None:
        later = frozenset(at for at, k in enumerate(members) if k in staging.by_weight)
    returned = received - staging.made_forward
    ahead, waiting = _received_early(staging, stage, received, early) if early else (0, 0)
    read_late = _read_at(eqns, later or ())
    delayed = kept_for_weights(eqns, phases, later or ()) | returned & read_late
    backward = [k for k, phase in enumerate(phases) if phase != "forward"] if received else []
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
        delayed=delayed,
        read_late=read_late & (residuals | received),
        read_once=received - _read_at(eqns, backward),
        num_delayed=num_delayed,
        offloaded=offloaded,
        received=received,
        returned=returned,
        num_ahead=ahead,
        num_waiting=waiting,
        sent=sent,
        pins=pins or {},
        times=() if window is None else window.times,
        reads={} if window is None else window.reads,
        tasks=[_task(staging, slices, k) for k in members] if slices else (),
        joined=frozenset(var for var in local_only if _has_examples(program, var)),
    )
    return StageScope(stage_eqns, tuple(layers), residuals, sent, tuple(members), later)


def _received_early(
    staging: Staging, stage: int, received: frozenset[Var], in_flight: Sequence[int]
) -> tuple[int, int]:
    """Return for how many microbatches more than those in flight a stage holds what it is sent
    forward, and for how many more than the one that runs what it is sent back, where transfers are
    received when they are sent.

    A stage is sent what its maker may hold. Cotangents wait where a stage runs more forwards before
    its first backward than it takes for that to come back.
    """
    ahead, waiting = [0], [0]
    for var in received:
        maker = staging.makers[var]
        more = in_flight[stage] - in_flight[maker]
        if var in staging.made_forward:
            ahead.append(-more)
        elif maker > stage:
            waiting.append((more - (maker - stage)) // BACK)
    return max(ahead), max(waiting)


def _read_at(eqns: Sequence[JaxprEqn], positions: Iterable[int]) -> frozenset[Var]:
    """Return what the equations at some positions read."""
    atoms = [a for k in positions for a in eqns[k].invars]
    return frozenset([a for a in atoms if not isinstance(a, Literal)])


def _has_examples(program: Program, var: Var) -> bool:
    """Return whether each microbatch has a part of a value, of its examples."""
    placement = program.placements.get(var)
    return placement is not None and placement.kind == "split"


def _task(staging: Staging, slices: Sequence[int], k: int) -> tuple[int, int, bool]:
    """Return which program of a stage an equation is of, in the order that they run in: phase,
    place of the token slice in it, whether it is of a backward by weight."""
    phase = PHASES.index(staging.phases[k])
    place = slices[k] if phase == 0 else -slices[k]
    return phase, 0 if phase == 2 else place, k in (staging.by_weight or ())


def boundary_bytes(program: Program, staging: Staging, num_layers: int) -> Floats:
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
