"""The joint search for a step in token slices: by a menu of slices, and by one of whole sequences.

A microbatch in S slices passes through the stages as S microbatches would of a share 1/S of its
seconds and activations, all alive before the first goes back (`JointProblem.num_slices`). That is
what is searched; slices are about as long as one another, which is what they are cut for. The
chosen stages are then priced as microbatches of slices, under every schedule they may run by and
have the memory for.

Before a step is cut, rows of whole microbatches say what its slices would take: what a row takes
per sample is shared by them, times what all slices do of the whole one's work, since each has the
keys up to its end only; what it takes for any microbatch, each of them takes. -> whole_in_slices()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from attrs import evolve, fields, has

import stage_dp
from alpa_interchange import StageCandidate, StagePlan, TokenSlice
from alpa_interchange.menu import Affine, JointProblem, LayerFloor, LayerMenu, LayerRow
from alpa_meta.options import Options
from alpa_meta.types import Function, PyTree

_RUNNING = ("transient_bytes", "kept_bytes")
SEARCHED = "1f1b"
"""Where it is allowed: pipelines of slices take about as long under the others, and hold more."""


def in_slices(problem: JointProblem, num_slices: int) -> JointProblem:
    """Return the problem whose microbatches are the slices of this one's."""
    floors = problem.floors_at
    share = 1.0 / num_slices

    def floors_at(mesh: int, number: int, samples: int) -> tuple[LayerFloor, ...]:
        assert floors is not None
        found: tuple[LayerFloor, ...] = _scaled(floors(mesh, number, samples), share)
        return found

    def shared(price: Function[Affine]) -> Function[Affine]:
        return lambda *place: cast(Affine, _scaled(price(*place), share))

    sliced = _in_parts(problem, num_slices, _scaled(problem.menu, share), shared)
    return evolve(sliced, floors_at=None if floors is None else floors_at)


def whole_in_slices(problem: JointProblem, num_slices: int, work: float) -> JointProblem:
    """Return the problem of as many slices of each microbatch of this one, whose rows are of whole
    sequences; `work`: what the slices of a sequence do, of what it does as a whole. Without proof,
    as floors are of whole sequences too."""
    share = 1.0 / num_slices

    def seconds(whole: Affine) -> Affine:
        return Affine(whole.fixed, whole.each * share * work)

    def sent(price: Function[Affine]) -> Function[Affine]:
        return lambda *place: _each(price(*place), share)

    def sliced(row: LayerRow) -> LayerRow:
        waiting = row.waiting_bytes
        return evolve(
            row,
            forward=seconds(row.forward),
            backward_input=seconds(row.backward_input),
            backward_weight=seconds(row.backward_weight),
            split_seconds=seconds(row.split_seconds),
            activation_bytes=_scaled(row.activation_bytes, share),
            delayed_bytes=_scaled(row.delayed_bytes, share),
            waiting_bytes=None if waiting is None else _scaled(waiting, share),
            transient_bytes=_each(row.transient_bytes, share),
        )

    meshes = tuple(
        evolve(
            mesh,
            rows=tuple(tuple(map(sliced, rows)) for rows in mesh.rows),
            conversion={pair: _each(one, share) for pair, one in mesh.conversion.items()},
            floors=(),
        )
        for mesh in problem.menu.meshes
    )
    menu = evolve(problem.menu, meshes=meshes)
    return evolve(_in_parts(problem, num_slices, menu, sent), floors_at=None, proof=False)


def _in_parts(
    problem: JointProblem, num_slices: int, menu: LayerMenu, price: Function[Function[Affine]]
) -> JointProblem:
    """Return the problem with slices for microbatches: `price` makes that of a boundary theirs."""
    return evolve(
        problem,
        menu=menu,
        batch_size=problem.batch_size * num_slices,
        counts=tuple(count * num_slices for count in problem.counts or ()) or None,
        schedules=(SEARCHED,) if SEARCHED in problem.schedules else ("gpipe",),
        num_slices=num_slices,
        boundary=price(problem.boundary),
        boundary_floor=price(problem.boundary_floor),
    )


def _each(whole: Affine, share: float) -> Affine:
    return Affine(whole.fixed, whole.each * share)


def _scaled(value: PyTree, share: float) -> PyTree:
    """Return a value with all that is of one microbatch scaled, but what only the one that runs
    has: its largest temporary, and what its slices keep for one another."""
    if isinstance(value, Affine):
        return Affine(value.fixed * share, value.each * share)
    if isinstance(value, tuple):
        return tuple(_scaled(one, share) for one in value)
    if isinstance(value, Mapping):
        return {key: _scaled(one, share) for key, one in value.items()}
    if has(type(value)):
        names = [one.name for one in fields(type(value)) if one.name not in _RUNNING]
        return evolve(value, **{name: _scaled(getattr(value, name), share) for name in names})
    return value


def of_microbatches(
    plan: StagePlan,
    num_slices: int,
    options: Options,
    memory: Sequence[float],
    split: Sequence[float],
) -> StagePlan:
    """Return a plan of slices as one of the microbatches that they are of, under the best schedule
    for it that leaves each stage within its `memory`; if none does, the one that lacks least.

    `split` [stages]: seconds that a slice takes more where its backward pass is in two parts.
    """
    count = plan.num_microbatches // num_slices
    alone = len(plan.stages) == 1  # which runs all slices as one program
    plain, in_parts = (
        tuple(
            evolve(stage, candidate=_of_microbatch(stage.candidate, num_slices, count, alone, one))
            for stage, one in zip(plan.stages, more, strict=True)
        )
        for more in ((0.0,) * len(split), split)
    )
    allowed = options.schedules
    if alone:
        allowed = ("1f1b",) if "1f1b" in allowed else allowed[:1]
    tried = []
    for number, name in enumerate(allowed):
        rule = stage_dp.SCHEDULE_RULES[name]
        if rule.interleaves and not options.schedule:
            continue
        stages = in_parts if rule.splits_backward else plain
        chain = [stage.candidate for stage in stages]
        held = (1,) * len(chain) if rule.interleaves else stage_dp.in_flight_counts(chain, name)
        peaks = tuple(stage_dp.peak_bytes(one, k) for one, k in zip(chain, held, strict=True))
        over = max(max(need - room for need, room in zip(peaks, memory, strict=True)), 0.0)
        tried.append((over, stage_dp.step_seconds(chain, name), number, name, held, peaks, stages))
    _, seconds, _, name, in_flight, peaks, stages = min(tried, key=lambda one: one[:3])
    return evolve(
        plan,
        stages=stages,
        num_microbatches=count,
        schedule=name,
        step_seconds=seconds,
        lower_bound=min(plan.lower_bound, seconds),
        peak_bytes=peaks,
        in_flight=in_flight,
    )


def _of_microbatch(
    candidate: StageCandidate, num_slices: int, count: int, alone: bool, split: float
) -> StageCandidate:
    forward, backward = candidate.forward_seconds, candidate.backward_seconds + split
    late = candidate.backward_weight_seconds
    each = TokenSlice(
        tokens=1, forward_seconds=forward, backward_seconds=backward, backward_weight_seconds=late
    )
    return evolve(
        candidate,
        num_microbatches=count,
        forward_seconds=forward * num_slices,
        backward_seconds=backward * num_slices,
        backward_weight_seconds=late * num_slices,
        activation_bytes=candidate.activation_bytes * num_slices,
        boundary_seconds=candidate.boundary_seconds * num_slices,
        token_slices=() if alone else (each,) * num_slices,
    )
