"""A plan in the prices of the menu it was chosen from, and menus with some of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import evolve, frozen

import stage_dp
from alpa_interchange import KeptMenu, ParallelPlan
from alpa_interchange.menu import JointPlan, JointProblem, LayerMenu, LayerRow, MeshMenu
from alpa_interchange.plan_text import mesh_text
from alpa_meta.errors import PlanError
from stage_dp import Known

SEARCHED = tuple(
    name
    for name, rule in stage_dp.SCHEDULE_RULES.items()
    if rule.pace is not None or rule.interleaves
)
NEAR = 4  # a search over all counts of a batch of 1,024 takes twice as long, mostly for nothing

Allowed = Callable[[LayerRow], bool]


@frozen(eq=False)
class Priced:
    """A plan in the prices of its menu: its stages by the menu's meshes, and `rows[layer]`."""

    problem: JointProblem
    stages: tuple[tuple[int, int, int], ...]
    plan: JointPlan
    rows: tuple[LayerRow, ...]

    @property
    def meshes(self) -> tuple[int, ...]:
        """The mesh of the menu that each stage runs on."""
        return tuple(mesh for _, _, mesh in self.stages)

    @property
    def known(self) -> Known:
        """The plan as a pipeline that searches may start from."""
        return Known.of(self.plan)

    def mesh(self, layer: int) -> MeshMenu:
        """Return the mesh of a layer's stage."""
        place = next(m for start, stop, m in self.stages if start <= layer < stop)
        return self.problem.menu.meshes[place]


def priced(plan: ParallelPlan, menu: KeptMenu, problem: JointProblem) -> Priced:
    """Return `plan` in the prices of `problem`, which was made from its menu.

    Its stages, microbatches, schedule and recomputation are kept; where its rows do not fit in the
    menu's terms, memory is not limited. Raises PlanError where the problem lacks a mesh of it.
    """
    if menu.fingerprint != plan.program.fingerprint:
        raise PlanError(
            "the menu was made for another program than the plan; pass the menu of this plan "
            "(step.menu, or plan.menu.json beside plan.json)"
        )
    stages = menu_stages(plan, problem.menu)
    kinds = [layer.recomputation for layer in plan.layers]
    count, schedule = plan.num_microbatches, plan.stage_plan.schedule
    interleaves = stage_dp.SCHEDULE_RULES[schedule].interleaves
    num_meshes = plan.stage_plan.num_meshes if interleaves else None
    told = problem
    if len(kinds) == problem.menu.num_layers:
        told = _with_kinds(problem, kinds)
    for any_memory in (False, True):
        try:
            found = stage_dp.price_stages(
                told, stages, count, schedule, num_meshes=num_meshes, any_memory=any_memory
            )
        except stage_dp.InfeasibleError:
            continue
        return Priced(problem, stages, found, rows_of(told.menu, found))
    raise PlanError(
        f"the menu has no rows for the plan's stages with {count} microbatches on "
        f"{sum(g.num_hosts for g in problem.device_groups)} hosts"
    )


def menu_stages(plan: ParallelPlan, menu: LayerMenu) -> tuple[tuple[int, int, int], ...]:
    """Return the stages of a plan as (first layer, stop, mesh of the menu)."""
    places = {(mesh.submesh, mesh.logical.shape): number for number, mesh in enumerate(menu.meshes)}
    found: list[tuple[int, int, int]] = []
    for stage in plan.stage_plan.stages:
        one = stage.candidate
        mesh = places.get((one.submesh, one.logical.shape))
        if mesh is None:
            raise PlanError(
                f"the menu has no mesh {mesh_text(one.logical)} of {one.submesh.num_hosts} x "
                f"{one.submesh.devices_per_host} devices that stage {len(found)} runs on; "
                "plan anew"
            )
        found.append((one.layer_start, one.layer_stop, mesh))
    if len(found) == 1:  # whole scans have other layers than scans in pieces
        return ((0, menu.num_layers, found[0][2]),)
    return tuple(found)


def rows_of(menu: LayerMenu, plan: JointPlan) -> tuple[LayerRow, ...]:
    """Return the row that a plan runs each layer with."""
    return tuple(
        menu.meshes[stage.mesh].rows[menu.class_of_layer[layer]][row]
        for stage in plan.stages
        for layer, row in zip(range(stage.layer_start, stage.layer_stop), stage.rows, strict=True)
    )


def restricted(problem: JointProblem, layers: Sequence[int], allowed: Allowed) -> JointProblem:
    """Return the problem where these layers, as classes of their own, have the `allowed` rows
    only."""
    menu, floor, wanted = problem.menu, problem.boundary_floor, set(layers)
    old = sorted({menu.class_of_layer[layer] for layer in wanted})
    base = len(menu.meshes[0].rows)
    number = {c: base + k for k, c in enumerate(old)}
    menu = evolve(
        menu,
        class_of_layer=tuple(
            number[c] if layer in wanted else c for layer, c in enumerate(menu.class_of_layer)
        ),
        meshes=tuple(
            evolve(
                mesh,
                rows=(*mesh.rows, *(tuple(filter(allowed, mesh.rows[c])) for c in old)),
                floors=(*mesh.floors, *(mesh.floors[c] for c in old)) if mesh.floors else (),
            )
            for mesh in menu.meshes
        ),
    )
    return evolve(
        problem,
        menu=menu,
        boundary_floor=lambda c, a, b, link: floor(old[c - base] if c >= base else c, a, b, link),
    )


def _with_kinds(problem: JointProblem, kinds: Sequence[str]) -> JointProblem:
    """Return the problem where each layer recomputes as told, where it can."""
    meshes = problem.menu.meshes
    known = {row.recomputation for mesh in meshes for rows in mesh.rows for row in rows}
    for kind in dict.fromkeys(kinds):
        if kind in known:
            layers = [layer for layer, one in enumerate(kinds) if one == kind]
            problem = restricted(problem, layers, recomputing(kind))
    return problem


def near_counts(problem: JointProblem, count: int, times: int = NEAR) -> JointProblem:
    """Return the problem with so many times more and fewer microbatches than `count`, which a plan
    has, and at least with what fills short pipelines."""
    counts = problem.counts or ()
    most = times * max(count, NEAR)
    return evolve(problem, counts=tuple(n for n in counts if count <= times * n and n <= most))


def of_meshes(problem: JointProblem, places: Sequence[int]) -> JointProblem:
    """Return the problem with the meshes at these places; boundaries keep their prices."""
    boundary, floor = problem.boundary, problem.boundary_floor
    return evolve(
        problem,
        menu=evolve(problem.menu, meshes=tuple(problem.menu.meshes[k] for k in places)),
        boundary=lambda a, out, b, into, link: boundary(places[a], out, places[b], into, link),
        boundary_floor=lambda number, a, b, link: floor(number, places[a], places[b], link),
    )


def at_places(known: Known, places: Sequence[int]) -> Known:
    """Return a pipeline with its meshes numbered by their position in `places`."""
    stages = ((start, stop, places.index(mesh)) for start, stop, mesh in known.stages)
    return evolve(known, stages=tuple(stages))


def recomputing(kind: str) -> Allowed:
    """Return what allows rows that recompute in one way."""
    return lambda row: row.recomputation == kind


def lacking_bytes(problem: JointProblem, plan: JointPlan) -> tuple[float, ...]:
    """Return by how many bytes each stage exceeds the memory of its devices; below 0 it does
    not."""
    return tuple(
        held - problem.device_groups[problem.menu.meshes[stage.mesh].submesh.host_group].memory
        for stage, held in zip(plan.stages, stage_dp.device_bytes(plan), strict=True)
    )
