"""What every layer range would cost on every submesh: the candidates of the stage DP.

For each logical mesh the whole program is solved once as one selection problem; identical layers
share their choice, so its cost splits into layers, and a range costs the sum of its layers. The
chosen stages are solved again exactly, each with its own memory limit (`planner`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve, field, frozen

from alpa_interchange import (
    LogicalMesh,
    ShardingSolution,
    StageCandidate,
    SubmeshSpec,
    TokenSlice,
)
from alpa_meta.compat import JaxprEqn, Literal, Var, shape_of
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.layer_costs import LayerCosts, solved_costs
from alpa_meta.inter_op.layering import Layering
from alpa_meta.inter_op.scan_cutting import CutProgram
from alpa_meta.inter_op.stage_costs import StageCosts
from alpa_meta.inter_op.stage_selection import StageScope, boundary_bytes, stage_scope
from alpa_meta.inter_op.staging import Staging
from alpa_meta.inter_op.window import Window, window_of
from alpa_meta.intra_op.bucketed_solution import solve_in_buckets
from alpa_meta.intra_op.memory_limit import solve, solve_within
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import Selection, build
from alpa_meta.operators import flops
from alpa_meta.options import Options
from alpa_meta.passes.live import live_eqns
from alpa_meta.pinning import Pin, pin_marks, pinned_inputs
from alpa_meta.presets import preset_pins
from alpa_meta.step.program import Program
from alpa_meta.token_slices.places import Slices
from alpa_meta.token_slices.staged import slice_numbers
from alpa_meta.types import Floats, Spec
from cost_model import CostModel

LIKELY_PRESETS = ("dp", "zero2", "zero3", "megatron", "2d")  # no plan is to cost more than these
# Nodes of a selection problem from which on it is solved to within `CLOSE`, a relative gap: the
# U-Net of Stable Diffusion (6,161 nodes) on 16 H100 takes 88 instead of 98 CPU s so, for 0.3168
# instead of 0.3167 s a step. Windows of equal layers have some hundred nodes.
MANY_NODES, CLOSE = 3000, 2e-4
LEAN_WEIGHTS = (1.0, 20.0)  # weight of memory against time in the leaner solutions of a mesh


@frozen(eq=False)
class MeshSolution:
    """The whole program solved on one logical mesh, by its window."""

    submesh: SubmeshSpec
    mesh: LogicalMesh
    costs: StageCosts
    solution: ShardingSolution
    whole: bool  # the mesh is the whole cluster, its memory limit was part of the problem
    selection: Selection


@frozen(eq=False)
class Outlook:
    """The program at one microbatch count, layered and staged as one stage.

    Where its scans over layers are in pieces, so that stages may cut them, `cut` says which, and
    `uncut` is the outlook with whole scans: what runs if there is one stage after all.
    """

    program: Program
    staging: Staging
    num_layers: int
    cut: CutProgram | None = None
    uncut: tuple[Outlook, Layering] | None = None
    pins: Mapping[str, Spec] = field(factory=dict)  # of the user, by leaf path
    _scopes: dict[bool, list[StageScope]] = field(factory=dict, init=False, repr=False)

    @functools.cached_property
    def window(self) -> Window:
        """The program without repeated layers: what costs per layer are taken from.

        Layers whose inputs the user pins otherwise are no repetition. Raises UnlikeCopiesError
        where a short program has not the copies that stand for the others.
        """
        results = {atom for atom in self.program.jaxpr.outvars if not isinstance(atom, Literal)}
        marks = pin_marks(self.program, self.pins)
        left_out = self.program.left_out
        return window_of(
            self.staging, self.num_layers, results, marks, left_out.layers if left_out else {}
        )

    def scope(self, pins: Mapping[Var, Pin], apart: bool) -> StageScope:
        """Return the window as one stage, the same for all meshes of equal `pins`.

        `apart`: its passes are programs of their own, as they are where there are more stages.
        """
        for known in self._scopes.setdefault(apart, []):
            if known.eqns.pins == pins:
                return known
        window, program = self.window, self.program
        sliced = apart and program.slices is not None  # one program runs all slices
        slices = slice_numbers(program, window.staging) if sliced else ()
        found = stage_scope(
            program, window.staging, 0, 1, pins, apart=apart, window=window, slices=slices
        )
        self._scopes[apart].append(found)
        return found


def solve_mesh(
    outlook: Outlook,
    submesh: SubmeshSpec,
    mesh: LogicalMesh,
    model: CostModel,
    memory: float,
    whole: bool,
    options: Options,
) -> tuple[list[MeshSolution], float]:
    """Return the solutions for one mesh, leaner ones where memory binds, and the bytes missing.

    On the whole cluster the memory limit is a constraint; elsewhere it depends on the range, so
    solutions that weigh memory more are added where the first one would not fit.
    """
    pins = input_pins(outlook.program, mesh, options)
    window, scope = outlook.window, outlook.scope(pins, apart=not whole)
    costs = MeshCosts(mesh, model, submesh.host_group)
    selection = build(scope.eqns, costs, f"{submesh.num_devices} devices {mesh.shape}")
    free = options.preset is None and not options.pins
    names = LIKELY_PRESETS if free else ()
    likely = (preset_pins(name, outlook.program, mesh) for name in names)
    many = selection.problem.num_nodes > MANY_NODES
    found = solve_in_buckets(selection, options, likely, CLOSE if many else 0.0)
    if found.choice is None:
        if found.status == "infeasible":
            return [], 0.0
        raise PlanError(
            f"no sharding was found on a mesh of {mesh.shape} (Options.solver_seconds="
            f"{options.solver_seconds}); give more seconds"
        )
    if whole:
        return _solve_whole(outlook, submesh, scope, selection, found, memory, options)
    first = solved_costs(scope, selection, found.choice, outlook.num_layers, window)
    solutions = [MeshSolution(submesh, mesh, first, found, False, selection)]
    if _needed(first) > memory:
        for weight in LEAN_WEIGHTS:
            lean = solve_lean(selection, found, weight, options)
            if lean.choice is not None:
                part = solved_costs(scope, selection, lean.choice, outlook.num_layers, window)
                solutions.append(MeshSolution(submesh, mesh, part, lean, False, selection))
    return solutions, 0.0


def _solve_whole(
    outlook: Outlook,
    submesh: SubmeshSpec,
    scope: StageScope,
    selection: Selection,
    free: ShardingSolution,
    memory: float,
    options: Options,
) -> tuple[list[MeshSolution], float]:
    """Return the solution for the whole cluster that fits, or the bytes missing."""
    found = solve_within(selection, options, memory, free)
    if found.choice is None:
        if found.smallest_memory is None:
            assert free.choice is not None
            return [], selection.memory.peak(free.choice).total - memory
        return [], max(found.smallest_memory - memory, 1.0)
    costs = solved_costs(scope, selection, found.choice, outlook.num_layers, outlook.window)
    mesh = selection.costs.mesh
    return [MeshSolution(submesh, mesh, costs, found, True, selection)], 0.0


def solve_lean(
    selection: Selection,
    first: ShardingSolution,
    weight: float,
    options: Options,
    tolerance: float = 0.0,
) -> ShardingSolution:
    """Return the solution where memory has a price: `weight` times all seconds for all bytes; to
    within a relative `tolerance`."""
    assert first.choice is not None and first.objective is not None
    peak = selection.memory.peak(first.choice)
    row, _ = selection.memory.row(peak.time)
    price = weight * first.objective / max(peak.total, 1.0)
    problem = selection.problem
    priced = evolve(problem, node_cost=problem.node_cost + price * row)
    return solve(priced, options, tolerance=tolerance)


def _needed(costs: StageCosts) -> float:
    held = costs.state.sum() + costs.gradients.sum() + costs.activations.sum()
    return float(held + costs.transient.max())


def input_pins(program: Program, mesh: LogicalMesh, options: Options) -> dict[Var, Pin]:
    """Return {variable: pin} of the preset and of the user's pins, which come first, on a mesh."""
    preset = {} if options.preset is None else preset_pins(options.preset, program, mesh)
    totals: dict[Var, Pin] = {total: Pin(((),) * len(shape_of(total))) for total in program.totals}
    return preset | pinned_inputs(program, mesh, options.pins) | totals


def range_candidates(
    outlook: Outlook,
    solutions: Sequence[MeshSolution],
    model: CostModel,
    floor: bool = False,
) -> list[StageCandidate]:
    """Return a candidate per layer range and mesh solution.

    With `floor`, seconds are replaced by proven least ones: the candidates of the bound's problem.
    """
    count = outlook.program.num_microbatches
    crossing = boundary_bytes(outlook.program, outlook.staging, outlook.num_layers)
    share = totals_share(outlook.program)
    found = []
    for number, solved in enumerate(solutions):
        for start, stop in _ranges(outlook.num_layers, solved.whole):
            found.append(
                _candidate(solved, start, stop, count, crossing, model, f"{number}", floor, share)
            )
    return found


def _ranges(num_layers: int, whole: bool) -> list[tuple[int, int]]:
    """Return all layers for what runs them as one program, else every smaller range."""
    every = (0, num_layers)
    if whole:
        return [every]
    ranges = itertools.combinations(range(num_layers + 1), 2)
    return [one for one in ranges if one != every]


def _candidate(
    solved: MeshSolution,
    start: int,
    stop: int,
    count: int,
    crossing: Floats,
    model: CostModel,
    key: str,
    floor: bool,
    totals_share: float,
) -> StageCandidate:
    costs, part = solved.costs, slice(start, stop)
    forward, backward = costs.forward[part].sum() / count, costs.backward[part].sum() / count
    by_weight = costs.by_weight[part].sum() / count
    update = costs.update[part].sum() + totals_share * costs.forward[part].sum()
    least = costs.floor[part].sum(axis=0)
    bound = least[0] / count
    held = _held(solved, part)
    if solved.whole and solved.solution.lower_bound is not None:
        bound = max(bound, (solved.solution.lower_bound - update) / count)
        least[1] = update
    if floor:
        scale = min(1.0, bound / max(forward + backward, 1e-300))
        forward, backward, update = forward * scale, backward * scale, least[1]
        by_weight *= scale
    edge = 0.0
    if stop < len(costs.forward) and not floor:
        edge = float(model.transfer_seconds(crossing[stop - 1], solved.submesh, solved.submesh))
    return StageCandidate(
        layer_start=start,
        layer_stop=stop,
        submesh=solved.submesh,
        logical=solved.mesh,
        num_microbatches=count,
        forward_seconds=float(forward),
        backward_seconds=float(backward),
        backward_weight_seconds=float(min(by_weight, backward)),
        step_seconds=float(update),
        state_bytes=0.0 if floor else held[0],
        activation_bytes=0.0 if floor else held[1],
        delayed_bytes=0.0 if floor else float(costs.delayed[part].sum()),
        waiting_bytes=0.0 if floor else float(costs.waiting[part].sum()),
        transient_bytes=0.0 if floor else held[2],
        boundary_seconds=edge,
        lower_bound_seconds=float(min(bound, forward + backward)),
        key=key,
    )


def _held(solved: MeshSolution, part: slice[int, int, None]) -> tuple[float, float, float]:
    """Return the bytes of state and gradients, of a microbatch's activations, of temporaries.

    Of the whole program at its peak; of a range of layers the most of each.
    """
    costs = solved.costs
    if solved.whole:
        state, gradients, activations, temporaries = costs.peak.bytes
        return state + gradients, activations, temporaries
    return (
        float(costs.state[part].sum() + costs.gradients[part].sum()),
        float(costs.activations[part].sum()),
        float(costs.transient[part].max()),
    )


def exact_candidate(
    scope: StageScope,
    selection: Selection,
    solution: ShardingSolution,
    template: StageCandidate,
    num_layers: int,
    share: float = 0.0,
    slices: tuple[Slices, Sequence[int]] | None = None,
) -> tuple[StageCandidate, StageCosts]:
    """Return a chosen stage's candidate with the figures of its own exact solution.

    `share` is the program's `totals_share`; `slices` are the token slices, and of which each
    equation of the stage is.
    """
    assert solution.choice is not None
    by_layer = LayerCosts(scope, selection, num_layers)
    costs = by_layer.under(solution.choice)
    count = template.num_microbatches
    state, gradients, activations, temporaries = costs.peak.bytes
    forth, back, once = beside_layers(selection.costs.model)
    candidate = evolve(
        template,
        forward_seconds=float(costs.forward.sum() / count) + forth,
        backward_seconds=float(costs.backward.sum() / count) + back,
        backward_weight_seconds=float(costs.by_weight.sum() / count),
        step_seconds=float(costs.update.sum() + share * costs.forward.sum()) + once,
        state_bytes=state + gradients,
        activation_bytes=activations / scope.eqns.in_flight,
        delayed_bytes=0.0,  # of those that are delayed, part of `activation_bytes`
        waiting_bytes=None,
        transient_bytes=temporaries,
        lower_bound_seconds=0.0,
    )
    if slices is not None:
        lengths, numbers = slices[0].lengths, slices[1]
        shares = by_layer.by_part(solution.choice, numbers, len(lengths))[:2]
        candidate = evolve(candidate, token_slices=_token_slices(candidate, lengths, shares))
    return candidate, costs


def beside_layers(model: CostModel) -> tuple[float, float, float]:
    """Return what a program that runs the step takes on every stage beside layers: seconds of each
    microbatch's passes, and of the step. Menus leave it out, whose bounds it holds above."""
    if model.program is None:
        return 0.0, 0.0, 0.0
    return *model.program.microbatch_seconds, model.program.step_seconds


def _token_slices(
    candidate: StageCandidate, lengths: Sequence[int], shares: Floats
) -> tuple[TokenSlice, ...]:
    """Return the seconds of a candidate by slice; `shares` [2, slices] are the forward's and the
    backward's, up to what is counted for the whole passes (buckets of collectives)."""
    whole = np.array([candidate.forward_seconds, candidate.backward_seconds])
    sums = shares.sum(axis=1)
    even = np.array(lengths) / sum(lengths)
    parts = np.where(sums[:, None] > 0, shares / np.maximum(sums, 1e-300)[:, None], even)
    forward, backward = (whole[:, None] * parts).tolist()
    late = candidate.backward_weight_seconds / max(candidate.backward_seconds, 1e-300)
    return tuple(
        TokenSlice(
            tokens=tokens,
            forward_seconds=forth,
            backward_seconds=back,
            backward_weight_seconds=back * late,
        )
        for tokens, forth, back in zip(lengths, forward, backward, strict=True)
    )


def totals_share(program: Program) -> float:
    """Return the part of the forward pass's operations that runs once more, before all else, to add
    up the totals that microbatches read.
    """
    if not program.totals:
        return 0.0
    forward = [
        eqn
        for eqn, phase in zip(program.jaxpr.eqns, program.phases.of_eqn, strict=True)
        if phase == "forward"
    ]
    copies = program.left_out.copies if program.left_out else {}

    def work(eqns: Sequence[JaxprEqn]) -> float:
        made = (program.origin.get(eqn.outvars[0], eqn.outvars[0]) for eqn in eqns)
        return sum(flops(eqn) * copies.get(var, 1) for eqn, var in zip(eqns, made, strict=True))

    return work(live_eqns(forward, list(program.totals.values()))) / max(work(forward), 1.0)


def microbatch_counts(
    possible: Sequence[int], num_stages: int | None, given: int | None
) -> list[int]:
    """Return the microbatch counts to plan for: one, and what pipelines of likely depths want, of
    the `possible` ones.

    About four microbatches per stage fill a 1F1B pipeline to 80 %.
    """
    if given is not None:
        return [given]
    if num_stages == 1:
        return [1]
    wanted = [8] if num_stages is None else [4 * num_stages, 2 * num_stages]
    chosen = {max(d for d in possible if d <= want) for want in wanted}
    if num_stages is None:
        chosen.add(1)
    return sorted(chosen, key=lambda count: (math.log2(count), count))
