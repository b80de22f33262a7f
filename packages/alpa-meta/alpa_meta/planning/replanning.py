"""What a plan would be on other links, with other memory or other hosts: from its menu, in a few
seconds. Where it changes: -> thresholds.py

A new plan is a pipeline of the menu's rows: stages, devices, microbatches, schedule and what is
recomputed, with its predicted seconds. Its stages are not solved exactly and it cannot be run as it
is: `Replanned.settings` are the options that plan it in full. Rows are those that were worth
keeping for the first cluster, so a plan anew may be faster; `bound` says by how much at most.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

import stage_dp
from alpa_interchange import ClusterSpec, KeptMenu, LinkSpec, ParallelPlan
from alpa_interchange.menu import JointPlan, JointProblem, LayerRow
from alpa_meta.errors import InfeasibleError, PlanError
from alpa_meta.named_cluster import as_cluster
from alpa_meta.planning.menu_prices import Priced, lacking_bytes, near_counts, priced, rows_of
from alpa_meta.planning.menu_problem import problem_of
from stage_dp import Known

if TYPE_CHECKING:
    from alpa_interchange import LogicalMesh, SubmeshSpec

LINKS = ("intra-host", "inter-host", "inter-group")
FULL = 4  # microbatches per stage of pipelines that a search starts from: a bubble of a fifth


@frozen(kw_only=True)
class Replanned:
    """A pipeline chosen from a kept menu for `cluster`; seconds are in the menu's prices.

    `before` is the old plan where it was, `kept` its choices here, None where they do not fit, with
    the bytes per device that its stages lack. `bound`: no plan with one of `counts` takes less, of
    all plans where `bound_holds`, else of those that the menu's rows make.
    """

    cluster: ClusterSpec
    memory: float | None
    plan: JointPlan
    rows: tuple[LayerRow, ...]  # of each layer
    meshes: tuple[tuple[SubmeshSpec, LogicalMesh], ...]  # (submesh, logical mesh) of each stage
    before_seconds: float
    kept_seconds: float | None
    lacking_bytes: float
    changed: bool
    bound: float
    bound_holds: bool
    counts: tuple[int, ...]  # of microbatches that were searched
    planning_seconds: float
    base: Priced = field(repr=False)
    menu: KeptMenu = field(repr=False)
    problem: JointProblem = field(repr=False)  # that was searched

    @property
    def settings(self) -> Mapping[str, object]:
        """Options that plan this pipeline in full: `parallelize(step, cluster, **settings)`."""
        found = {
            "num_stages": len(self.plan.stages),
            "num_microbatches": self.plan.num_microbatches,
            "schedule": self.plan.schedule,
            "recompute": tuple(row.recomputation for row in self.rows),
        }
        return found if self.memory is None else {**found, "memory": self.memory}


SAME = 1e-9  # of the step time, by which sums of equal seconds differ


def replan(
    plan: ParallelPlan,
    menu: KeptMenu,
    cluster: ClusterSpec | str | None = None,
    memory: float | None = None,
) -> Replanned:
    """Return the best pipeline of the plan's menu on `cluster` (also by name) with `memory` bytes
    per device.

    `menu` is what the plan was chosen from (`step.menu`, `load_menu`); without a cluster or memory
    those of the plan are kept. Raises InfeasibleError where nothing fits, PlanError where the menu
    cannot tell: of other devices, or a plan that no menu was made for.
    """
    started = time.perf_counter()
    cluster, memory = as_cluster(cluster or plan.cluster), memory or menu.memory
    count = plan.num_microbatches
    old = priced(plan, menu, problem_of(menu, num_microbatches=count))
    every = problem_of(menu, cluster, memory, count)
    base, lacking = _here(plan, menu, every)
    for problem in (near_counts(every, count), every):
        starts = _starts(problem, plan) if base is None or lacking > 0 else []
        starts += [] if base is None else again(base.plan, problem)
        found = solved(problem, starts)
        if found is not None:
            break
    if found is None:
        raise InfeasibleError(
            f"no pipeline of the plan's menu fits {cluster.num_devices} devices of "
            f"{cluster.name!r}; its rows were kept for the memory it was made for, so plan anew, "
            "or allow more memory",
            lacking,
            None,
        )
    rows = rows_of(problem.menu, found)
    if base is not None and lacking <= 0:
        kept = base.plan
        if kept.step_seconds <= found.step_seconds * (1 + SAME):  # other choices, none quicker
            found, rows = evolve(kept, lower_bound=found.lower_bound), base.rows
    return Replanned(
        cluster=cluster,
        memory=memory,
        plan=found,
        rows=rows,
        meshes=tuple(
            (problem.menu.meshes[stage.mesh].submesh, problem.menu.meshes[stage.mesh].logical)
            for stage in found.stages
        ),
        before_seconds=old.plan.step_seconds,
        kept_seconds=None if base is None or lacking > 0 else base.plan.step_seconds,
        lacking_bytes=lacking,
        changed=base is None
        or _choices(problem, base.plan, base.rows) != _choices(problem, found, rows),
        bound=found.lower_bound,
        bound_holds=_bound_holds(menu, problem, cluster),
        counts=problem.counts or (),
        planning_seconds=time.perf_counter() - started,
        base=old,
        menu=menu,
        problem=problem,
    )


def changed_cluster(
    cluster: ClusterSpec,
    hosts: Mapping[int, int] | None = None,
    links: Mapping[str, float] | None = None,
) -> ClusterSpec:
    """Return a cluster with other numbers of hosts, by host group, and other links, by LINKS.

    Links are bytes/s in one direction, as their maker states them; latency and the share of them
    that is reached stay.
    """
    groups = list(cluster.host_groups)
    for number, count in (hosts or {}).items():
        if number >= len(groups):
            raise PlanError(
                f"there is no host group {number} in {cluster.name!r}, which has {len(groups)}"
            )
        groups[number] = evolve(groups[number], num_hosts=count)
    between = cluster.inter_group
    for name, bandwidth in (links or {}).items():
        if name == "intra-host":
            groups = [evolve(g, intra_host=_with(g.intra_host, bandwidth)) for g in groups]
        elif name == "inter-host":
            groups = [evolve(g, inter_host=_with(g.inter_host, bandwidth)) for g in groups]
        elif name == "inter-group" and len(groups) > 1:
            between = _with(between or cluster.link_between(0, 1), bandwidth)
        else:
            raise PlanError(
                f"a link is one of {', '.join(LINKS)} (the last with several host groups), got "
                f"{name!r}"
            )
    pairs = () if links and "inter-group" in links else cluster.group_links
    made = evolve(cluster, host_groups=tuple(groups), inter_group=between, group_links=pairs)
    return made if made == cluster else evolve(made, name=f"{cluster.name} changed")


def link_of(cluster: ClusterSpec, name: str) -> LinkSpec:
    """Return the link of one of LINKS; of several groups the first one's."""
    group = cluster.host_groups[0]
    if name == "inter-group":
        return cluster.link_between(0, 1)
    return group.intra_host if name == "intra-host" else group.inter_host


def _here(plan: ParallelPlan, menu: KeptMenu, problem: JointProblem) -> tuple[Priced | None, float]:
    """Return the old choices in a new problem, None where they cannot be, and the bytes lacking."""
    try:
        base = priced(plan, menu, problem)
    except PlanError:  # fewer hosts than it needs
        return None, 0.0
    return base, max(*lacking_bytes(problem, base.plan), 0.0)


def _with(link: LinkSpec, bandwidth: float) -> LinkSpec:
    return evolve(link, bandwidth=bandwidth)


def _starts(problem: JointProblem, plan: ParallelPlan) -> list[Known]:
    """Return pipelines to start a search from where the old one cannot be: equal stages on all
    devices, for each mesh, with the microbatches that the plan had, or more that fill the pipeline.
    Where meshes ran several stages, they run as many.
    """
    old = plan.stage_plan
    chunks = len(old.stages) // old.num_meshes
    layers = problem.menu.num_layers
    devices = sum(group.num_hosts * group.devices_per_host for group in problem.device_groups)
    found = []
    for number, mesh in enumerate(problem.menu.meshes):
        meshes = min(max(devices // mesh.submesh.num_devices, 1), layers // chunks)
        stages = chunks * meshes
        if problem.num_stages not in (None, stages):
            continue
        cuts = [round(k * layers / stages) for k in range(stages + 1)]
        chain = tuple((a, b, number) for a, b in itertools.pairwise(cuts))
        enough = [n for n in problem.counts or () if n >= FULL * stages]
        count = max(plan.num_microbatches, min(enough, default=1))
        found.append(Known(chain, count, old.schedule, meshes if chunks > 1 else None))
    return found


def again(plan: JointPlan, problem: JointProblem) -> list[Known]:
    """Return a pipeline of a problem with its own microbatches, and with half and twice as many."""
    known, count = Known.of(plan), plan.num_microbatches
    counts = [n for n in problem.counts or () if n in (count // 2, count, 2 * count)]
    return [evolve(known, num_microbatches=n) for n in counts]


def solved(problem: JointProblem, known: Sequence[Known]) -> JointPlan | None:
    """Return the best pipeline of a problem, None if none fits."""
    try:
        return stage_dp.solve_joint(evolve(problem, proof=False), *known)
    except stage_dp.InfeasibleError:
        return None


def _choices(problem: JointProblem, plan: JointPlan, rows: Sequence[LayerRow]) -> Hashable:
    """Return what makes plans differ: all but the figures of their `rows`, by layer."""
    menus = problem.menu.meshes
    return (
        plan.num_microbatches,
        plan.schedule if len(plan.stages) > 1 else "",
        plan.num_meshes,
        tuple(
            (s.layer_start, s.layer_stop, menus[s.mesh].submesh, menus[s.mesh].logical.shape)
            for s in plan.stages
        ),
        tuple(row.recomputation for row in rows),
    )


def _bound_holds(menu: KeptMenu, problem: JointProblem, cluster: ClusterSpec) -> bool:
    """Return whether the search's bound is of all plans, not of the menu's rows: there are floors
    of all meshes that the hosts can form, and for every count."""
    more = any(
        new.num_hosts > old.num_hosts
        for new, old in zip(cluster.host_groups, menu.cluster.host_groups, strict=True)
    )
    floors = all(mesh.floors for mesh in problem.menu.meshes)
    return floors and not more and set(problem.counts or ()) <= set(menu.counts)
