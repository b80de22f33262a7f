"""The stages of a pipeline solved exactly, each under the memory limit that its devices leave it.

Devices that run several stages hold what lasts of all of them, and the temporaries of one at a
time. Of these the ones solved first may take all that rows say the others leave; where one of the
others turns out to need more, as much is withheld from the first, and they are solved again.
-> StageSolving
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

import stage_dp
from alpa_interchange import (
    PlacedStage,
    ShardingSolution,
    StageCandidate,
    StagePlan,
    StageSharding,
)
from alpa_meta.inter_op.candidates import exact_candidate, input_pins, totals_share
from alpa_meta.inter_op.meshes import usable_memory
from alpa_meta.inter_op.stage_selection import StageScope, stage_scope
from alpa_meta.inter_op.staging import Staging
from alpa_meta.intra_op.equal_stages import Stages
from alpa_meta.intra_op.selection import Selection
from alpa_meta.options import Options
from alpa_meta.planning.counted_passes import solved_for
from alpa_meta.planning.operator_names import StageNames
from alpa_meta.planning.plan_identity import problem_hash
from alpa_meta.planning.plan_summary import stage_sharding
from alpa_meta.step.program import Program
from alpa_meta.token_slices.places import Slices
from alpa_meta.token_slices.staged import slice_numbers
from cost_model import CostModel

# Share of a step by which stages may undercut the bound of their menu. Its rows are built at one
# microbatch size and priced at the others, though what XLA is taken to fuse is decided at the
# former: MoE-380M of 4 layers on one V100, in microbatches of 16, takes 2.5e-4 less than rows built
# at 1 say, and as much as rows built at 16. And numbers that only the update computes, such as the
# mean of the losses, have a layer of their own in the menu: 2e-6 of a step of 0.1 ms.
MENU_ERROR = 1e-3
# Of solving the stages of a pipeline, with more withheld from all but the last of those that share
# devices. An estimate: each solves the stages of one mesh again, and with one round GPT-6.7B on 16
# V100 takes 48.5 s a step, not 46.1; other numbers were not tried.
SHARED_ROUNDS = 6

Choose = Callable[[StageCandidate, Selection, float], ShardingSolution]
"""From a stage's candidate, its selection problem and a limit in bytes to a choice of
strategies."""


@frozen
class Lacking:
    """The bytes that a stage lacks of its limit, and how many more its devices need than the rows
    of their stages say."""

    bytes: float
    unpredicted: float


@frozen
class SolvedStage:
    """A stage with its choice of strategies, and the problem that it is a solution of."""

    placed: PlacedStage
    sharding: StageSharding
    selection: Selection


class StageSolving:
    """Solves the stages of a pipeline of `num_layers` layers; `choose` answers each one's problem
    under a limit in bytes."""

    def __init__(
        self,
        program: Program,
        staging: Staging,
        stage_plan: StagePlan,
        num_layers: int,
        model: CostModel,
        options: Options,
        choose: Choose,
    ) -> None:
        self.program, self.staging, self.stage_plan = program, staging, stage_plan
        self.num_layers, self.model, self.options = num_layers, model, options
        self.choose = choose
        self.passes: Sequence[int] = ()
        self.names = StageNames(staging, program.jaxpr.constvars)
        self.built = Stages()
        self._selected: dict[int, tuple[StageScope, Selection]] = {}
        # By stage and choice, what a plan says of it.
        self._finished: dict[
            tuple[int, tuple[int, ...] | None], tuple[PlacedStage, StageSharding]
        ] = {}
        self._known: dict[str, tuple[ShardingSolution, int]] = {}  # with microbatches in flight
        self._predicted = stage_dp.device_bytes(
            stage_plan
        )  # () of random plans: they have no limit
        self._alive = stage_dp.alive_together(stage_plan)
        # By mesh that runs several stages: bytes withheld from all but the last of these.
        self._withheld: dict[int, float] = {}

    def run(self, passes: Sequence[int] = ()) -> list[SolvedStage] | Lacking:
        """Return the stages solved, or what one lacks; `passes` says how often those of each stage
        count (`counted_passes`)."""
        self.passes = passes
        self._withheld.clear()
        for _ in range(SHARED_ROUNDS):
            solved: list[SolvedStage] = []
            lacking = self._solve(solved)
            if lacking is None:
                break
            mesh = len(solved) % self.stage_plan.num_meshes
            if mesh == len(solved):  # the first of its stages
                break
            self._withheld[mesh] = self._withheld.get(mesh, 0.0) + lacking.bytes
        return solved if lacking is None else lacking

    def _solve(self, solved: list[SolvedStage]) -> Lacking | None:
        """Add the stages to `solved`, up to one that lacks what is returned."""
        num_stages = len(self.stage_plan.stages)
        for stage in range(num_stages):
            self.options.progress("stages", stage, num_stages)
            found = self._stage(stage, solved)
            if isinstance(found, Lacking):
                return found
            excess = self._excess([*solved, found])
            if excess is not None:
                return excess
            solved.append(found)
        self.options.progress("stages", num_stages, num_stages)
        return None

    def _stage(self, stage: int, solved: Sequence[SolvedStage]) -> SolvedStage | Lacking:
        """Return a stage solved beside those before it, or what it lacks."""
        placed, in_flight = self.stage_plan.stages[stage], self.stage_plan.in_flight[stage]
        selection = self._selection(stage)[1]
        memory = self._memory(placed)
        limit = self._limit(stage, memory, solved)
        counted = self.passes[stage] if self.passes else None
        key = problem_hash(selection) + repr((selection.problem.node_cost.sum(), limit, counted))
        finished = functools.partial(self._finish, stage)
        solution, of_more = self._known.get(key, (None, 0))
        found = None
        if solution is not None and still_fits(selection, solution, limit):
            found = finished(solution)
        if found is None or (in_flight < of_more and _slower(found[0], placed)):
            chosen = functools.partial(self.choose, placed.candidate)
            if counted is None:
                solution = chosen(selection, limit)
            else:
                solution = solved_for(selection, counted, limit, chosen)
            if solution.choice is None:
                lacking = max((solution.smallest_memory or limit * 1.1) - limit, 1.0)
                told = min(self._predicted[stage], memory)
                return Lacking(lacking, memory + lacking - told)
            self._known[key] = solution, in_flight
            found = finished(solution)
        return SolvedStage(*found, selection)

    def _selection(self, stage: int) -> tuple[StageScope, Selection]:
        """Return the scope of a stage and its selection problem, remembered."""
        if stage not in self._selected:
            self._selected[stage] = stage_selection(
                self.program,
                self.staging,
                stage,
                self.stage_plan,
                self.model,
                self.options,
                self.built,
            )
        return self._selected[stage]

    def _finish(self, stage: int, solution: ShardingSolution) -> tuple[PlacedStage, StageSharding]:
        """Return what a plan says of a stage that runs by `solution`, remembered by its choice."""
        key = stage, solution.choice
        if key not in self._finished:
            self._finished[key] = finished_stage(
                self.program,
                self.staging,
                stage,
                self.stage_plan.stages[stage],
                self._selection(stage),
                solution,
                self.num_layers,
                self.names,
                self.options.executor,
            )
        return self._finished[key]

    def _memory(self, placed: PlacedStage) -> float:
        """Return the bytes of one of a stage's devices."""
        host_group = placed.candidate.submesh.host_group
        return usable_memory(self.model.cluster, host_group, self.options.memory)

    def _limit(self, stage: int, memory: float, solved: Sequence[SolvedStage]) -> float:
        """Return the bytes that a stage may use of its devices' `memory`: what the other stages of
        its mesh leave, those already `solved` and those to come. It has the most transients of
        them, or as many less as its rows say.
        """
        num_meshes = self.stage_plan.num_meshes
        if not self._predicted or num_meshes == len(self.stage_plan.stages):
            return memory
        mesh, place = stage % num_meshes, stage // num_meshes
        chunks = self._chunks(mesh, solved)
        own = chunks[place]
        taken = stage_dp.bytes_together(chunks, self._alive[mesh]) - own.lasting - own.transient
        if place + 1 < len(chunks):
            taken += self._withheld.get(mesh, 0.0)
        return memory - taken

    def _excess(self, solved: Sequence[SolvedStage]) -> Lacking | None:
        """Return what the devices of the last of these stages lack where they run several, each of
        which was solved with other transients than the next ones have."""
        num_meshes, last = self.stage_plan.num_meshes, len(solved) - 1
        if not self._predicted or last < num_meshes:
            return None
        mesh = last % num_meshes
        chunks = self._chunks(mesh, solved)[: last // num_meshes + 1]
        needed = stage_dp.bytes_together(chunks, self._alive[mesh])
        memory = self._memory(solved[-1].placed)
        if needed <= memory * (1 + 1e-9):
            return None
        return Lacking(needed - memory, needed - min(self._predicted[last], memory))

    def _chunks(self, mesh: int, solved: Sequence[SolvedStage]) -> list[stage_dp.Chunk]:
        """Return what the stages of a mesh hold: those already `solved`, and by their rows."""
        rows = self.stage_plan
        num = len(solved)
        known = evolve(
            rows,
            stages=(*(one.placed for one in solved), *rows.stages[num:]),
            peak_bytes=(*(one.sharding.peak_bytes for one in solved), *rows.peak_bytes[num:]),
        )
        return stage_dp.chunks_of(known)[mesh :: rows.num_meshes]


def stage_selection(
    program: Program,
    staging: Staging,
    stage: int,
    stage_plan: StagePlan,
    model: CostModel,
    options: Options,
    built: Stages,
) -> tuple[StageScope, Selection]:
    """Return the scope of a stage and its selection problem, that of an equal one `built`
    before."""
    candidate, in_flight = stage_plan.stages[stage].candidate, stage_plan.in_flight[stage]
    early = stage_dp.SCHEDULE_RULES[stage_plan.schedule].receives_early
    pins = input_pins(program, candidate.logical, options)
    num_delayed = 0
    if staging.by_weight is not None:
        num_delayed = in_flight - min(program.num_microbatches, staging.num_stages - stage)
    slices = slice_numbers(program, staging) if staging.num_stages > 1 else ()
    scope = stage_scope(
        program,
        staging,
        stage,
        in_flight,
        pins,
        num_delayed=num_delayed,
        slices=slices,
        early=stage_plan.in_flight if early else (),
    )
    costs = built.costs(candidate.logical, model, candidate.submesh.host_group)
    return scope, built.build(scope.eqns, costs, f"stage {stage}")


def finished_stage(
    program: Program,
    staging: Staging,
    stage: int,
    placed: PlacedStage,
    selected: tuple[StageScope, Selection],
    solution: ShardingSolution,
    num_layers: int,
    names: StageNames,
    executor: str,
) -> tuple[PlacedStage, StageSharding]:
    """Return what a plan says of a stage that runs by `solution`: its figures, and its sharding."""
    scope, selection = selected
    sliced = _sliced(program, staging)
    numbers = slice_numbers(program, staging)
    of_stage = [numbers[k] for k in scope.members]
    candidate, costs = exact_candidate(
        scope,
        selection,
        solution,
        placed.candidate,
        num_layers,
        totals_share(program),
        None if sliced is None else (sliced, of_stage),
    )
    memory = costs.peak.by_kind()
    sharding = stage_sharding(program, placed, selection, solution, memory, executor, names, stage)
    return PlacedStage(candidate=candidate, device_ids=placed.device_ids), sharding


def _sliced(program: Program, staging: Staging) -> Slices | None:
    """Return the token slices that stages run one by one; one stage runs all as one program."""
    return program.slices if staging.num_stages > 1 else None


def still_fits(selection: Selection, solution: ShardingSolution, limit: float) -> bool:
    """Return whether the solution of an equal stage does for one that may hold more
    microbatches."""
    return solution.choice is not None and selection.memory.peak(solution.choice).total <= limit


def _slower(made: PlacedStage, placed: PlacedStage) -> bool:
    """Return whether a stage takes longer than its layers do by the menu: one with fewer
    microbatches in flight than an equal one may keep more of each."""
    count = placed.candidate.num_microbatches
    after, before = (
        count * (one.forward_seconds + one.backward_seconds) + one.step_seconds
        for one in (made.candidate, placed.candidate)
    )
    return after > before * (1 + MENU_ERROR)
