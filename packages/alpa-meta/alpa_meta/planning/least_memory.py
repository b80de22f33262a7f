"""The least memory that a device holds under any plan, known before the search.

A step is taken as if every value could be cut over all devices, at the fewest and at the most
microbatches. With S the bytes that live through the whole step, it holds

    S + the operands and results of any one operator                       -> _largest_operator()

and, where that is not known to be too much, with no layer computed again, and with all selectively
or in full: for layer l under recomputation r

    own(l, r)    most that is held while l runs, beside S and what other layers keep for their
                 backward pass                                                       -> _Held.own
    kept(l, r)   what l has kept when its own backward pass begins                   -> _Held.kept

a plan that chooses r layer by layer holds, summed over all devices, at least

    S + max over l of (min over r of own(l, r) + sum over k < l of min over r of kept(k, r))
                                                                                    -> _least()

Stages share the devices, so that pipelines hold as much: each stage has its own fullest moment.
Numbers of microbatches in between keep more than the most and add up the same gradients.
-> least_bytes()
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from alpa_interchange import LogicalMesh, SubmeshSpec
from alpa_interchange.amounts import counted
from alpa_interchange.menu import RECOMPUTATIONS
from alpa_meta.compat import Atom, Var, is_drop, subjaxprs
from alpa_meta.errors import InfeasibleError
from alpa_meta.inter_op.candidates import Outlook
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.inter_op.short_step import ShortStep
from alpa_meta.inter_op.stage_selection import StageScope, stage_scope
from alpa_meta.inter_op.window import UnlikeCopiesError
from alpa_meta.intra_op.liveness import KINDS
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.one_device import OneDevice, memory_on_one_device
from alpa_meta.operators import operator_of
from alpa_meta.options import Options
from alpa_meta.planning.memory_floor import array_bytes, enough_devices, room
from alpa_meta.planning.microbatch_counts import refusal
from alpa_meta.planning.outlooks import by_short_step, outlook_in_pieces, outlook_of, short_step_of
from alpa_meta.step.program import Program, Step
from cost_model import CostModel


def check_step_fits(step: Step, model: CostModel, options: Options) -> None:
    """Raise InfeasibleError if no plan can hold the step, also with other microbatches and
    recomputation than the options name: those are remedies."""
    cluster = model.cluster
    has = room(cluster, options)
    if _all_bytes(step.program(1)) <= has.total:
        return
    limit = has.total / has.num_devices
    free = evolve(options, num_microbatches=None, recompute=None)
    short = short_step_of(step, free, cluster) or step
    for chosen in (options, free) if free != options else (free,):
        needed = least_bytes(step, model, chosen, has.total) / has.num_devices
        if needed <= limit:
            return
    least = math.ceil(needed - limit)
    most = _counts(step, free, short)[0]
    cut = counted(most, "microbatch", "microbatches")
    others = ", or ".join(_others(step, model, free, most, needed))
    raise InfeasibleError(
        f"no plan fits the memory: whatever is computed again, in up to {cut} and with every array "
        f"cut over all of {has.num_devices} devices, each holds at least {needed:,.0f} bytes at "
        f"some moment; each device has {limit:,.0f} bytes for the program and lacks at least "
        f"{least:,} more on cluster {cluster.name!r}; it takes at least {others}",
        float(least),
    )


def may_hold(step: Step, model: CostModel, options: Options) -> bool:
    """Return whether it is not known that no plan can hold the step, as the options say."""
    has = room(model.cluster, options)
    return least_bytes(step, model, options, has.total) <= has.total


def _others(
    step: Step, model: CostModel, options: Options, most: int, needed: float
) -> Iterator[str]:
    """Yield what a step needs that no plan can hold; only it may do, as `needed` is a bound."""
    has = room(model.cluster, options)
    limit = has.total / has.num_devices
    own = room(model.cluster, evolve(options, memory=None)).least
    if own >= needed:
        yield f"the {own:,.0f} bytes that a device has (memory)"
    total = needed * has.num_devices
    yield f"{enough_devices(lambda count: total / count, has.num_devices, limit)} devices"
    yield f"devices with {needed:,.0f} bytes"
    if most < (step.batch_size or 1):
        yield "a smaller batch, which cannot be cut into single examples"


def least_bytes(step: Step, model: CostModel, options: Options, enough: float) -> float:
    """Return bytes, summed over all devices, that every plan holds at some moment.

    What fits in `enough` need not be known better. Repeated layers are looked at once, where the
    step without them can stand for it.
    """

    def look(short: Step | ShortStep) -> float:
        return _least_bytes(short, step, model, options, enough)

    return by_short_step(step, options, model.cluster, look)


def _least_bytes(
    short: Step | ShortStep, step: Step, model: CostModel, options: Options, enough: float
) -> float:
    """Return the bytes by the programs of a short step; UnlikeCopiesError if they cannot tell."""
    counts = _counts(step, options, short)
    if isinstance(short, ShortStep) and any(short.program(count).inexact for count in counts):
        raise UnlikeCopiesError  # the mean of its microbatches is another program
    state = sum(
        array_bytes(leaf.aval)
        for leaf in step.program(1).inputs
        if leaf.role == "state" and leaf.memory == "device"
    )
    of_one = {count: state + _largest_operator(short.program(count)) for count in counts}
    found = min(of_one.values())
    if found > enough:
        return found
    found = math.inf
    for count in counts:
        program = short.program(count)
        if of_one[count] > enough:
            found = min(found, of_one[count])
            continue
        if options.recompute is None and _whole_peak(program, model, options) <= enough:
            return 0.0
        for in_pieces in (False, True):
            held = _held_by_kind(program, model, options, in_pieces)
            found = min(found, _least(held) if held else math.inf)
            if found <= enough:
                return found
    return found


def _counts(step: Step, options: Options, short: Step | ShortStep) -> list[int]:
    """Return the most and the fewest microbatches that a plan may use."""
    if options.num_microbatches is not None:
        return [options.num_microbatches]
    counts = [count for count in step.microbatch_counts if count > 1]
    most = next((c for c in reversed(counts) if not refusal(short, c, options)), 1)
    return list(dict.fromkeys((most, 1)))


def _all_bytes(program: Program) -> float:
    """Return the bytes of every value of a program, as if all lived at once."""
    made = (var for eqn in program.jaxpr.eqns for var in eqn.outvars)
    return sum(map(tensor_bytes, (*program.jaxpr.invars, *made)))


def _largest_operator(program: Program) -> float:
    """Return the most bytes of the operands and results of one operator, but for state."""
    jaxpr = program.jaxpr
    state = {
        v for v, leaf in zip(jaxpr.invars, program.inputs, strict=True) if leaf.role == "state"
    }
    returned = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}  # may replace state
    alias: dict[Var, Atom] = {}
    largest = 0.0
    for eqn in jaxpr.eqns:
        form = operator_of(eqn).liveness
        read = {alias.get(a, a) for a in eqn.invars if isinstance(a, Var)}
        if form == "alias" and len(eqn.outvars) == 1 and isinstance(eqn.invars[0], Var):
            alias[eqn.outvars[0]] = alias.get(eqn.invars[0], eqn.invars[0])
        elif form in ("stored", "written") and not subjaxprs(eqn):
            made = {var for var in eqn.outvars if not is_drop(var)}
            first = eqn.invars[0] if eqn.invars else None
            if form == "written" and isinstance(first, Var):
                read.discard(alias.get(first, first))  # the result takes its place
            held = (read - state) | (made - returned)
            largest = max(largest, sum(map(tensor_bytes, held)))
    return largest


@frozen(eq=False)
class _Held:
    """What a program holds on one device, beside its state, by layer (see above); bytes.

    `update` is the most that is held while the update runs.
    """

    state: float
    update: float
    own: NDArray[np.float64]
    kept: NDArray[np.float64]


def _least(held: list[_Held]) -> float:
    own = np.min([one.own for one in held], axis=0)
    kept = np.min([one.kept for one in held], axis=0)
    before = np.cumsum(kept) - kept
    moving = float(np.max(own + before, initial=0.0))
    return min(one.state for one in held) + max(moving, min(one.update for one in held))


def _whole_peak(program: Program, model: CostModel, options: Options) -> float:
    """Return what a program holds at most on one device if nothing is computed again."""
    outlook, _ = outlook_of(program, options, model.cluster)
    window = outlook.window
    scope = stage_scope(program, window.staging, 0, 1, window=window)
    return _on_one_device(scope, model).memory.peak([0]).total


def _held_by_kind(
    program: Program, model: CostModel, options: Options, in_pieces: bool
) -> list[_Held]:
    """Return what a program holds under each kind of recomputation; none if it has no pieces."""
    kinds = RECOMPUTATIONS if options.recompute is None else (options.recompute,)
    found = []
    for kind in kinds:
        chosen = evolve(options, recompute=kind)
        outlooks = outlook_in_pieces if in_pieces else outlook_of
        outlook = outlooks(program, chosen, model.cluster)
        if outlook is not None:
            found.append(_held(outlook[0], model))
    return found


def _on_one_device(scope: StageScope, model: CostModel) -> OneDevice:
    device = SubmeshSpec(num_hosts=1, devices_per_host=1)
    mesh: LogicalMesh = model.logical_mesh(device, (1,), ("x",))
    return memory_on_one_device(scope.eqns, MeshCosts(mesh, model, 0))


def _held(outlook: Outlook, model: CostModel) -> _Held:
    """Return what the layers of a program hold, those that are left out of its window as the
    copies that stand for them."""
    window = outlook.window
    scope = stage_scope(outlook.program, window.staging, 0, 1, window=window)
    memory, begins = _on_one_device(scope, model)
    equation = np.searchsorted(np.array(begins), np.arange(memory.num_times), side="right") - 1
    layers = np.array([-1 if layer is None else layer for layer in scope.layers], dtype=int)
    phases = np.array(scope.eqns.phases)
    usage = memory.usage([0])
    state = float(usage[KINDS.index("state")].max(initial=0.0))
    moving = usage.sum(axis=0) - usage[KINDS.index("state")]
    changes = np.zeros((outlook.num_layers, memory.num_times + 1))
    of_all = np.zeros(memory.num_times + 1)
    for span in memory.spans:
        home = equation[span.start]
        if span.kind == KINDS.index("activations") and home >= 0 and phases[home] == "forward":
            stop, size = min(span.stop, memory.num_times), span.source.bytes
            for held, times in ((changes[layers[home]], 1), (of_all, span.count)):
                held[span.start] += times * size
                held[stop] -= times * size
    by_layer = np.cumsum(changes, axis=1)[:, :-1]
    moving -= np.cumsum(of_all)[:-1]
    own, kept = np.zeros(outlook.num_layers), np.zeros(outlook.num_layers)
    in_update = (equation >= 0) & (phases[equation] == "update")
    for layer in set(layers[layers >= 0]):
        here = (equation >= 0) & (layers[equation] == layer) & ~in_update
        back = np.flatnonzero(here & (phases[equation] == "backward"))
        own[layer] = (moving + by_layer[layer])[here].max(initial=0.0)
        kept[layer] = by_layer[layer, back[0]] if len(back) else 0.0
    stand_ins = np.array(window.layer_of)
    own, kept = own[stand_ins].min(axis=1), kept[stand_ins].min(axis=1)
    return _Held(state, float(moving[in_update].max(initial=0.0)), own, kept)
