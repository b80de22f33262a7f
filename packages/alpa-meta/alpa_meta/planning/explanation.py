"""Why a plan is as it is: for each of its decisions the price of the next best alternative.

All prices are those of the plan's menu (`kept_menu`), as is the plan's own, which the alternatives
are compared with. Decisions about the pipeline are searched again with the choice forbidden; those
about single stages are priced with everything else kept, or all but the rows of their stage:

    schedule, microbatches, stages, mesh     a joint search without the choice   -> _best()
    boundary                                 one layer more or less before it    -> _boundary()
    recomputation, sharding, state           rows of the layers the other way    -> _of_run()

To another sharding the other layers of the stage may adapt theirs, lest conversions be its price.

Where an alternative does not fit, it is priced as if it did, and the bytes that it lacks are said.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import eq

from attrs import evolve, frozen

import stage_dp
from alpa_interchange import KeptMenu, ParallelPlan, StagePlan
from alpa_interchange.amounts import counted, format_bytes, format_seconds
from alpa_interchange.menu import JointPlan, JointProblem, LayerRow, MeshMenu
from alpa_interchange.plan_text import mesh_text, number_text
from alpa_meta.planning.menu_prices import (
    SEARCHED,
    Allowed,
    Priced,
    at_places,
    lacking_bytes,
    near_counts,
    of_meshes,
    priced,
    recomputing,
    restricted,
    rows_of,
)
from alpa_meta.planning.menu_problem import problem_of
from cost_model import CostModel, calibrated_model
from stage_dp import Known

SAME_STATE = 0.05  # of a layer's state: rows that differ by less hold their state in one way


@frozen(kw_only=True)
class Alternative:
    """The next best choice for one decision of a plan.

    `seconds`: more per step than the plan, less than 0 where it is quicker; None: there is no such
    pipeline. `lacking_bytes`: what stage `stage` lacks per device; then `seconds` are as if it fit.
    `distinct`: whether the cost model can tell the two steps apart.
    """

    decision: str
    where: str
    chosen: str
    instead: str
    seconds: float | None = None
    lacking_bytes: float = 0.0
    stage: int | None = None
    distinct: bool = True

    def __str__(self) -> str:
        at = f" of {self.where}" if self.where else ""
        subject = f"{self.decision}{at}: {self.chosen}"
        if self.seconds is None:
            return f"{subject}; there is no alternative in the menu"
        if not self.lacking_bytes:
            more = "more" if self.seconds >= 0 else "less"
            doubt = "" if self.distinct else ", which predictions cannot tell apart"
            return (
                f"{subject}; {self.instead} takes {format_seconds(abs(self.seconds))} {more}{doubt}"
            )
        lacking = f"stage {self.stage} exceeds memory by {format_bytes(self.lacking_bytes)}"
        if self.seconds < 0:
            return f"{subject} costs {format_seconds(-self.seconds)}; with {self.instead} {lacking}"
        return f"{subject}; {self.instead} takes {format_seconds(self.seconds)} more, and {lacking}"


@frozen(kw_only=True)
class Explanation:
    """The decisions of a plan with their alternatives.

    `menu_seconds` are the plan's in the prices of its menu, which alternatives are compared with;
    `step_seconds` those of its stages solved exactly.
    """

    step_seconds: float
    menu_seconds: float
    lower_bound: float
    alternatives: tuple[Alternative, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.alternatives))


def explain(
    plan: ParallelPlan,
    menu: KeptMenu,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    *,
    pipeline_only: bool = False,
) -> Explanation:
    """Return the decisions of `plan`, each with the price of its next best alternative.

    `pipeline_only`: schedule, microbatches, stages and meshes, not what single stages decide.
    `menu` is what the plan was chosen from: `step.menu`, or `load_menu(plan, "plan.menu.json")`.
    `progress(stage, done, total)` is called as that of `Options`.
    """
    base = _with_room(priced(plan, menu, problem_of(menu, num_microbatches=plan.num_microbatches)))
    decisions = [*_of_pipeline(base), *([] if pipeline_only else _of_stages(base))]
    found: list[Alternative] = []
    for number, alternatives in enumerate(decisions):
        progress("explain", number, len(decisions))
        found += alternatives()
    progress("explain", len(decisions), len(decisions))
    return Explanation(
        step_seconds=plan.step_seconds,
        menu_seconds=base.plan.step_seconds,
        lower_bound=plan.lower_bound,
        alternatives=_distinguished(found, base.plan.step_seconds, calibrated_model(plan.cluster)),
    )


def _distinguished(
    alternatives: Sequence[Alternative], seconds: float, model: CostModel
) -> tuple[Alternative, ...]:
    """Return the alternatives of a plan of `seconds` with whether they can be told from it."""
    return tuple(
        one
        if one.seconds is None
        else evolve(one, distinct=model.distinguishes(seconds, seconds + one.seconds))
        for one in alternatives
    )


def _with_room(base: Priced) -> Priced:
    """Return a plan that fits: its stages were solved exactly, and do, where the menu's estimates
    of them may not."""
    groups = list(base.problem.device_groups)
    for stage, held in zip(base.plan.stages, stage_dp.device_bytes(base.plan), strict=True):
        number = base.problem.menu.meshes[stage.mesh].submesh.host_group
        groups[number] = evolve(groups[number], memory=max(groups[number].memory, held))
    return evolve(base, problem=evolve(base.problem, device_groups=tuple(groups)))


def described(plan: JointPlan | StagePlan) -> str:
    """Return the settings of a pipeline: its stages, microbatches and schedule."""
    count = counted(plan.num_microbatches, "microbatch", "microbatches")
    return f"{counted(len(plan.stages), 'stage')}, {count}, {plan.schedule}"


def _of_pipeline(base: Priced) -> list[Callable[[], Iterable[Alternative]]]:
    """Return what prices the alternatives of each decision about the pipeline."""
    near = evolve(near_counts(base.problem, base.plan.num_microbatches), proof=False)
    searched = (_schedule, _microbatches, _stages)
    return [
        *(functools.partial(decision, base, near) for decision in searched),
        *(functools.partial(_meshes, base, near, m) for m in dict.fromkeys(base.meshes)),
    ]


def _of_stages(base: Priced) -> list[Callable[[], Iterable[Alternative]]]:
    """Return what prices the alternatives of each decision about single stages."""
    return [
        *(functools.partial(_boundary, base, place) for place in range(len(base.stages) - 1)),
        *(functools.partial(_of_run, base, run) for run in _runs(base)),
    ]


def _schedule(base: Priced, problem: JointProblem) -> Iterator[Alternative]:
    count, chosen = base.plan.num_microbatches, base.plan.schedule
    if len(base.stages) > 1 and count > 1:
        schedules = tuple(name for name in SEARCHED if name != chosen)
        starts = [Known(_one_per_mesh(base.known), count, name) for name in schedules]
        others = [(evolve(problem, schedules=schedules), starts)]
        yield _best(base, "schedule", "", chosen, others)


def _microbatches(base: Priced, problem: JointProblem) -> Iterator[Alternative]:
    count = base.plan.num_microbatches
    left = tuple(other for other in problem.counts or () if other != count)
    if left:
        starts = [evolve(base.known, num_microbatches=other) for other in left]
        chosen = counted(count, "microbatch", "microbatches")
        yield _best(base, "microbatches", "", chosen, [(evolve(problem, counts=left), starts)])


def _stages(base: Priced, problem: JointProblem) -> Iterator[Alternative]:
    count = len(base.stages)
    numbers = {count - 1, count + 1, count // 2, 2 * count}
    numbers &= set(range(1, problem.menu.num_layers + 1))
    if numbers:
        merged = _one_per_mesh(base.known)
        starts = {len(merged): [Known(merged, base.plan.num_microbatches, s) for s in SEARCHED]}
        others = [
            (evolve(problem, num_stages=number), starts.get(number, []))
            for number in sorted(numbers)
        ]
        yield _best(base, "stages", "", counted(count, "stage"), others)


def _one_per_mesh(known: Known) -> tuple[tuple[int, int, int], ...]:
    """Return the stages of a pipeline with those of each mesh, where it runs several, as one."""
    each = len(known.stages) // (known.num_meshes or len(known.stages))
    runs = [known.stages[at : at + each] for at in range(0, len(known.stages), each)]
    return tuple((run[0][0], run[-1][1], run[0][2]) for run in runs)


def _meshes(base: Priced, problem: JointProblem, number: int) -> Iterator[Alternative]:
    """Yield what plans without one logical mesh, and without its submesh, cost."""
    menu = problem.menu
    mesh = menu.meshes[number]
    on_it = [stage for stage, (_, _, m) in enumerate(base.stages) if m == number]
    where = f"stage{'s' if len(on_it) > 1 else ''} {number_text(on_it)}"
    submesh = mesh.submesh
    same = [k for k, other in enumerate(menu.meshes) if other.submesh == submesh]
    if len(same) > 1:
        left = [k for k in range(len(menu.meshes)) if k != number]
        starts = [
            evolve(
                base.known,
                stages=tuple((a, b, other if m == number else m) for a, b, m in base.stages),
            )
            for other in same
            if other != number
        ]
        others = [_only(problem, left, starts)]
        chosen = mesh_text(mesh.logical)
        yield _best(base, "logical mesh", where, chosen, others, lambda one: mesh_text(one.logical))
    left = [k for k in range(len(menu.meshes)) if k not in same]
    others = [_only(problem, left, [])] if left else []
    yield _best(base, "submesh", where, _devices_text(mesh), others, _devices_text)


def _devices_text(mesh: MeshMenu) -> str:
    return f"{mesh.submesh.num_hosts} x {mesh.submesh.devices_per_host} devices"


def _only(
    problem: JointProblem, places: Sequence[int], starts: Sequence[Known]
) -> tuple[JointProblem, list[Known]]:
    """Return the problem with the meshes at these places, and what to start from there."""
    return of_meshes(problem, places), [at_places(known, places) for known in starts]


def _best(
    base: Priced,
    decision: str,
    where: str,
    chosen: str,
    problems: Sequence[tuple[JointProblem, list[Known]]],
    mesh_of: Callable[[MeshMenu], str] | None = None,
) -> Alternative:
    """Return the best plan of some problems as the alternative to a decision; to one about meshes
    with what `mesh_of` says of its own."""
    plans: list[tuple[JointPlan, JointProblem]] = []
    for problem, starts in problems:
        try:
            plans.append((stage_dp.solve_joint(problem, *starts), problem))
        except stage_dp.InfeasibleError:
            continue
    if not plans:
        return Alternative(decision=decision, where=where, chosen=chosen, instead="")
    found, problem = min(plans, key=lambda one: one[0].step_seconds)
    instead = described(found)
    if mesh_of is not None:
        meshes = dict.fromkeys(mesh_of(problem.menu.meshes[one.mesh]) for one in found.stages)
        instead = f"{' and '.join(meshes)} ({instead})"
    return Alternative(
        decision=decision,
        where=where,
        chosen=chosen,
        instead=instead,
        seconds=found.step_seconds - base.plan.step_seconds,
    )


def _boundary(base: Priced, place: int) -> Iterator[Alternative]:
    """Yield what the boundary after a stage costs one layer earlier or later, all else kept."""
    (start, cut, before), (_, stop, after) = base.stages[place : place + 2]
    moved = {
        f"layer {other}": (
            *base.stages[:place],
            (start, other, before),
            (other, stop, after),
            *base.stages[place + 2 :],
        )
        for other in (cut - 1, cut + 1)
        if start < other < stop
    }
    where = f"stages {place} and {place + 1}"
    tried = [_priced(base, base.problem, stages) for stages in moved.values()]
    yield _least(base, "boundary", where, f"layer {cut}", list(zip(moved, tried, strict=True)))


def _runs(base: Priced) -> Iterator[range]:
    """Yield the layers of each stage that run by one row."""
    for start, stop, _ in base.stages:
        for _, layers in itertools.groupby(range(start, stop), key=lambda k: base.rows[k]):
            found = list(layers)
            yield range(found[0], found[-1] + 1)


def _of_run(base: Priced, run: range) -> Iterator[Alternative]:
    """Yield the alternatives of layers that run by one row, all else kept."""
    mesh, row = base.mesh(run.start), base.rows[run.start]
    rows = mesh.rows[base.problem.menu.class_of_layer[run.start]]
    where = f"layer{'s' if len(run) > 1 else ''} {number_text(run)}"
    kind, held = row.recomputation, row.state_bytes

    def other(decision: str, chosen: str, ways: dict[str, Allowed]) -> Iterator[Alternative]:
        adapting = decision != "recomputation"
        possible = {name: way for name, way in ways.items() if any(map(way, rows))}
        if possible:
            tried = [
                (name, _priced(base, _rows_kept(base, run, way, adapting), base.stages))
                for name, way in possible.items()
            ]
            yield _least(base, decision, where, chosen, tried)

    kinds = {one.recomputation for one in rows} - {kind}
    wanted = ["none"] if kind != "none" else sorted(kinds)
    names = {k: f"{k} recomputation" for k in sorted(kinds)} | {"none": "nothing recomputed"}
    yield from other(
        "recomputation",
        kind,
        {names[k]: recomputing(k) for k in wanted},
    )
    yield from other(
        "sharding",
        _layout(mesh, row),
        {"the next best": lambda one: one.recomputation == kind and not _alike(one, row)},
    )

    def state(less: bool) -> Allowed:
        def allowed(one: LayerRow) -> bool:
            differs = one.state_bytes - held
            return (
                one.recomputation == kind
                and (differs < 0) == less
                and (abs(differs) > SAME_STATE * held)
            )

        return allowed

    yield from other(
        "state",
        f"{format_bytes(held)} a layer",
        {"more of it on a device": state(False), "less of it on a device": state(True)},
    )


def _alike(one: LayerRow, other: LayerRow) -> bool:
    """Return whether rows differ by their key at most."""
    return evolve(one, key=other.key) == other


def _layout(mesh: MeshMenu, row: LayerRow) -> str:
    """Return the specs in which a row leaves what crosses to the next layer."""
    specs = dict.fromkeys(re.findall(r"\[[^]]*\]", mesh.layouts[row.layout_out]))
    return f"activations {' '.join(specs)}" if specs else "nothing for a next layer"


def _rows_kept(base: Priced, run: range, allowed: Allowed, adapting: bool) -> JointProblem:
    """Return the problem where the layers of a run have the allowed rows, and others their own.

    `adapting`: other layers of its stage only keep what they recompute.
    """
    stage = next(range(*one[:2]) for one in base.stages if run.start in range(*one[:2]))
    problem = base.problem
    for layers in _runs(base):
        if layers == run:
            problem = restricted(problem, layers, allowed)
            continue
        row = base.rows[layers.start]
        if adapting and layers.start in stage:
            problem = restricted(problem, layers, recomputing(row.recomputation))
        else:
            problem = restricted(problem, layers, functools.partial(eq, row))
    return problem


def _priced(
    base: Priced, problem: JointProblem, stages: Sequence[tuple[int, int, int]]
) -> tuple[JointPlan, float, int] | None:
    """Return a pipeline with its missing bytes and the stage that lacks most; None if it cannot
    be."""
    plan = base.plan
    count = plan.num_microbatches
    for any_memory in (False, True):
        try:
            found = stage_dp.price_stages(
                problem,
                stages,
                count,
                plan.schedule,
                num_meshes=base.known.num_meshes,
                any_memory=any_memory,
            )
        except stage_dp.InfeasibleError:
            continue
        if not any_memory:
            return found, 0.0, 0
        lacking = lacking_bytes(problem, found)
        left = [
            bytes - more
            for bytes, more in zip(lacking, _held_more(base, problem, found), strict=True)
        ]
        worst = max(range(len(left)), key=lambda stage: left[stage])
        return found, max(left[worst], 0.0), worst
    return None


def _held_more(base: Priced, problem: JointProblem, found: JointPlan) -> Iterator[float]:
    """Yield the bytes of each stage that are not of its rows, but of more microbatches in flight
    than the plan holds: some schedules hold as many as fit."""
    samples = problem.batch_size // found.num_microbatches
    rows = rows_of(problem.menu, found)
    for stage, held, before in zip(found.stages, found.in_flight, base.plan.in_flight, strict=True):
        own = rows[stage.layer_start : stage.layer_stop]
        yield max(held - before, 0) * sum(row.waiting(samples) for row in own)


def _least(
    base: Priced,
    decision: str,
    where: str,
    chosen: str,
    tried: Sequence[tuple[str, tuple[JointPlan, float, int] | None]],
) -> Alternative:
    """Return the best of the pipelines tried, first of those that fit."""
    found = [(name, *one) for name, one in tried if one is not None]
    if not found:
        return Alternative(decision=decision, where=where, chosen=chosen, instead="")
    name, plan, lacking, stage = min(found, key=lambda one: (one[2] > 0, one[1].step_seconds))
    return Alternative(
        decision=decision,
        where=where,
        chosen=chosen,
        instead=name,
        seconds=plan.step_seconds - base.plan.step_seconds,
        lacking_bytes=lacking,
        stage=stage if lacking else None,
    )
