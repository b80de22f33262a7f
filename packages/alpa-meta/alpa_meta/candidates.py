"""What every layer range would cost on every submesh: the candidates of the stage DP.

For each logical mesh the whole program is solved once as one selection problem; identical layers
share their choice, so its cost splits into layers, and a range costs the sum of its layers. The
chosen stages are solved again exactly, each with its own memory limit (`planner`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

import ilp_sharding
from alpa_interchange import (
    LogicalMesh,
    ShardingSolution,
    StageCandidate,
    SubmeshSpec,
)
from alpa_meta.errors import PlanError
from alpa_meta.intra_op import Selection, build
from alpa_meta.mesh_costs import MeshCosts
from alpa_meta.options import Options
from alpa_meta.pinning import Pin, pinned_inputs
from alpa_meta.presets import preset_pins
from alpa_meta.program import Program
from alpa_meta.stage_selection import (
    StageCosts,
    StageScope,
    boundary_bytes,
    solved_costs,
    stage_scope,
)
from alpa_meta.staging import Staging
from cost_model import CostModel

LEAN_WEIGHTS = (1.0, 20.0)  # weight of memory against time in the leaner solutions of a mesh


@frozen(eq=False)
class MeshSolution:
    """The whole program solved on one logical mesh."""

    submesh: SubmeshSpec
    mesh: LogicalMesh
    costs: StageCosts
    solution: ShardingSolution
    whole: bool  # the mesh is the whole cluster, its memory limit was part of the problem
    scope: StageScope | None = None  # of a whole solution, with its problem
    selection: Selection | None = None


@frozen(eq=False)
class Outlook:
    """The program at one microbatch count, layered and staged as one stage."""

    program: Program
    staging: Staging
    num_layers: int


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
    scope = stage_scope(
        outlook.program, outlook.staging, 0, 1, input_pins(outlook.program, mesh, options)
    )
    costs = MeshCosts(mesh, model, submesh.host_group)
    selection = build(scope.eqns, costs, f"{submesh.num_devices} devices {mesh.shape}")
    solutions = []
    found = solve(selection, options, None)
    if found.choice is None:
        if found.status == "infeasible":
            return [], 0.0
        raise PlanError(
            f"no sharding was found on a mesh of {mesh.shape} within {options.solver_seconds} s; "
            "raise Options.solver_seconds"
        )
    first = solved_costs(scope, selection, found.choice, outlook.num_layers)
    needed = _needed(first)
    if not whole or needed <= memory:
        solutions.append(MeshSolution(submesh, mesh, first, found, whole, scope, selection))
    if needed <= memory:
        return solutions, 0.0
    if whole:
        limit = memory - first.transient.max()
        missing = needed - memory
        if limit > 0:
            tight = solve(selection, options, limit)
            if tight.choice is not None:
                exact = solved_costs(scope, selection, tight.choice, outlook.num_layers)
                return [MeshSolution(submesh, mesh, exact, tight, True, scope, selection)], 0.0
            if tight.smallest_memory is not None:
                missing = tight.smallest_memory - limit
        return [], missing
    for weight in LEAN_WEIGHTS:
        lean = _solve_lean(selection, found, weight, options)
        if lean.choice is not None:
            part = solved_costs(scope, selection, lean.choice, outlook.num_layers)
            solutions.append(MeshSolution(submesh, mesh, part, lean, False))
    return solutions, 0.0


def solve(selection: Selection, options: Options, memory: float | None) -> ShardingSolution:
    """Return the solution of a selection problem under a memory limit."""
    return ilp_sharding.solve(
        evolve(selection.problem, memory_limit=memory),
        ilp_sharding.SolveOptions(deadline=options.solver_seconds, seed=options.seed),
    )


def _solve_lean(
    selection: Selection, first: ShardingSolution, weight: float, options: Options
) -> ShardingSolution:
    problem = selection.problem
    assert first.choice is not None and first.objective is not None
    offsets = np.concatenate([[0], np.cumsum(problem.num_strategies)[:-1]])
    held = float(problem.node_memory[offsets + np.array(first.choice)].sum())
    price = weight * first.objective / max(held, 1.0)
    lean = evolve(
        problem, node_cost=problem.node_cost + price * problem.node_memory, memory_limit=None
    )
    return ilp_sharding.solve(
        lean, ilp_sharding.SolveOptions(deadline=options.solver_seconds, seed=options.seed)
    )


def _needed(costs: StageCosts) -> float:
    held = costs.state.sum() + costs.gradients.sum() + costs.activations.sum()
    return float(held + costs.transient.max())


def input_pins(program: Program, mesh: LogicalMesh, options: Options) -> dict[Any, Pin]:
    """Return {variable: pin} of the preset and of the user's pins, which come first, on a mesh."""
    preset = {} if options.preset is None else preset_pins(options.preset, program, mesh)
    return preset | pinned_inputs(program, mesh, options.pins)


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
    found = []
    for number, solved in enumerate(solutions):
        for start, stop in _ranges(outlook.num_layers, solved.whole):
            found.append(
                _candidate(solved, start, stop, count, crossing, model, f"{number}", floor)
            )
    return found


def _ranges(num_layers: int, whole: bool) -> list[tuple[int, int]]:
    if whole:
        return [(0, num_layers)]
    return [
        (start, stop) for start in range(num_layers) for stop in range(start + 1, num_layers + 1)
    ]


def _candidate(
    solved: MeshSolution,
    start: int,
    stop: int,
    count: int,
    crossing: np.ndarray,
    model: CostModel,
    key: str,
    floor: bool,
) -> StageCandidate:
    costs, part = solved.costs, slice(start, stop)
    forward, backward = costs.forward[part].sum() / count, costs.backward[part].sum() / count
    update = costs.update[part].sum()
    least = costs.floor[part].sum(axis=0)
    bound = least[0] / count
    if solved.whole and solved.solution.lower_bound is not None:
        bound = max(bound, (solved.solution.lower_bound - update) / count)
        least[1] = update
    if floor:
        scale = min(1.0, bound / max(forward + backward, 1e-300))
        forward, backward, update = forward * scale, backward * scale, least[1]
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
        step_seconds=float(update),
        state_bytes=0.0 if floor else float(costs.state[part].sum() + costs.gradients[part].sum()),
        activation_bytes=0.0 if floor else float(costs.activations[part].sum()),
        transient_bytes=0.0 if floor else float(costs.transient[part].max()),
        boundary_seconds=edge,
        lower_bound_seconds=float(min(bound, forward + backward)),
        key=key,
    )


def exact_candidate(
    scope: StageScope,
    selection: Selection,
    solution: ShardingSolution,
    template: StageCandidate,
    num_layers: int,
) -> tuple[StageCandidate, StageCosts]:
    """Return a chosen stage's candidate with the figures of its own exact solution."""
    assert solution.choice is not None
    costs = solved_costs(scope, selection, solution.choice, num_layers)
    count = template.num_microbatches
    candidate = evolve(
        template,
        forward_seconds=float(costs.forward.sum() / count),
        backward_seconds=float(costs.backward.sum() / count),
        step_seconds=float(costs.update.sum()),
        state_bytes=float(costs.state.sum() + costs.gradients.sum()),
        activation_bytes=float(costs.activations.sum()),
        transient_bytes=float(costs.transient.max()),
        lower_bound_seconds=0.0,
    )
    return candidate, costs


def microbatch_counts(batch: int, num_stages: int | None, given: int | None) -> list[int]:
    """Return the microbatch counts to plan for: one, and what pipelines of likely depths want.

    About four microbatches per stage fill a 1F1B pipeline to 80 %.
    """
    if given is not None:
        return [given]
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    if num_stages == 1:
        return [1]
    wanted = [8] if num_stages is None else [4 * num_stages, 2 * num_stages]
    chosen = {max(d for d in divisors if d <= want) for want in wanted}
    if num_stages is None:
        chosen.add(1)
    return sorted(chosen, key=lambda count: (math.log2(count), count))
