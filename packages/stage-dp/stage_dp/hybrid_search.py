"""Per-layer hybrid search: one strategy per layer, least time within memory (Galvatron's problem).

The search itself is in layer_choice.py: exact, for real-valued bytes.

With pipelines a layer's bytes are state + in_flight * activation. `segment_candidates` solves every
stretch of layers for every number of microbatches in flight, for the least seconds per microbatch
including the share of the step. `solve_stages` then chooses among these stages; with step seconds
that is a heuristic, since a stage that is not the slowest had better be chosen without its share
(-> joint_search.py, which keeps both).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from alpa_interchange.check import non_empty, non_negative
from alpa_interchange.mesh import LogicalMesh, SubmeshSpec
from alpa_interchange.stage import StageCandidate
from stage_dp.infeasibility import InfeasibleError
from stage_dp.layer_choice import LayerRows, choose_rows

Array = NDArray[np.float64]


@frozen(kw_only=True)
class StrategyRow:
    """One way to run one layer on a submesh. Seconds per microbatch, bytes per device."""

    name: str
    forward_seconds: float = field(validator=non_negative)
    backward_seconds: float = field(validator=non_negative)
    step_seconds: float = field(default=0.0, validator=non_negative)  # once per step
    state_bytes: float = field(default=0.0, validator=non_negative)
    activation_bytes: float = field(default=0.0, validator=non_negative)  # per microbatch
    transient_bytes: float = field(default=0.0, validator=non_negative)  # largest of a stage counts


@frozen(kw_only=True)
class LayerType:
    """A kind of layer with its strategies."""

    name: str = field(validator=non_empty)
    strategies: tuple[StrategyRow, ...] = field(validator=non_empty)


@frozen(kw_only=True)
class HybridProblem:
    """Layers in order, by type, on one submesh.

    `transitions[a, b]` [strategies of a, strategies of b] are seconds per microbatch between
    neighbours of types named a and b; pairs not given cost nothing.
    """

    layers: tuple[LayerType, ...] = field(validator=non_empty)
    memory: float = field(validator=non_negative)
    num_microbatches: int = 1
    transitions: Mapping[tuple[str, str], Array] = field(factory=dict)

    def transition(self, before: LayerType, after: LayerType) -> Array:
        """Return the transition seconds [strategies of before, strategies of after]."""
        shape = (len(before.strategies), len(after.strategies))
        matrix = np.asarray(self.transitions.get((before.name, after.name), np.zeros(shape)))
        if matrix.shape != shape or not (matrix >= 0).all():
            raise ValueError(
                f"transitions[{before.name!r}, {after.name!r}] must be non-negative with shape "
                f"{shape}, got shape {matrix.shape}"
            )
        return matrix


@frozen(kw_only=True)
class HybridPlan:
    """The strategy number of each layer. `seconds` is one microbatch plus its share of the step."""

    choice: tuple[int, ...]
    seconds: float
    bytes: float
    lower_bound: float  # proven by prices; the search itself is exact

    def names(self, problem: HybridProblem) -> tuple[str, ...]:
        """Return the strategy name of each layer."""
        return tuple(
            layer.strategies[s].name for layer, s in zip(problem.layers, self.choice, strict=True)
        )


def solve_layers(problem: HybridProblem, *, in_flight: int = 1) -> HybridPlan:
    """Return the strategies with the least seconds that fit with `in_flight` microbatches alive.

    Raises InfeasibleError with the missing bytes.
    """
    best: HybridPlan | None = None
    bound = math.inf
    transients = sorted({s.transient_bytes for t in problem.layers for s in t.strategies})
    for transient in transients:
        rows = _rows(problem, in_flight, transient)
        if rows is None:
            continue
        plan = choose_rows(rows, problem.memory - transient)
        if plan is None:
            continue
        choice, seconds, lower = plan
        bound = min(bound, lower)
        if best is None or seconds < best.seconds:
            used = _used_bytes(problem, choice, in_flight)
            best = HybridPlan(choice=choice, seconds=seconds, bytes=used, lower_bound=lower)
    if best is None:
        least = min(
            sum(float(b.min()) for b in rows.bytes) + transient
            for transient in transients
            if (rows := _rows(problem, in_flight, transient)) is not None
        )
        missing = least - problem.memory
        raise InfeasibleError(
            f"{len(problem.layers)} layers with {in_flight} microbatches in flight need at least "
            f"{least:.0f} bytes per device, {missing:.0f} more than the {problem.memory:.0f} there "
            "are; add a strategy that keeps less (sharded state, recomputation) or more devices",
            missing_bytes=missing,
            remedy="a strategy that keeps less per device",
        )
    return HybridPlan(
        choice=best.choice,
        seconds=best.seconds,
        bytes=best.bytes,
        lower_bound=min(bound, best.seconds),
    )


def segment_candidates(
    problem: HybridProblem,
    *,
    submesh: SubmeshSpec,
    logical: LogicalMesh,
    boundary_seconds: Sequence[float] = (),
    max_in_flight: int | None = None,
) -> tuple[StageCandidate, ...]:
    """Return stage candidates for every stretch of layers on `submesh`, best for each memory need.

    `boundary_seconds` [layers]: to send one microbatch from layer k on (default: nothing).
    `max_in_flight` is the most microbatches any schedule in question holds (default: all). The
    candidate's `key` lists the strategy numbers; equal stretches are solved once.
    """
    num = len(problem.layers)
    most = min(problem.num_microbatches, max_in_flight or problem.num_microbatches)
    solved: dict[tuple[str, ...], list[HybridPlan]] = {}
    floors: dict[tuple[str, ...], float] = {}
    result = []
    for start in range(num):
        for stop in range(start + 1, num + 1):
            layers = problem.layers[start:stop]
            names = tuple(layer.name for layer in layers)
            if names not in solved:
                solved[names] = _plans_by_memory(problem, layers, most)
            if solved[names] and names not in floors:
                floors[names] = _least_seconds(problem, layers)
            for plan in solved[names]:
                rows = [t.strategies[s] for t, s in zip(layers, plan.choice, strict=True)]
                share = _transition_seconds(problem, layers, plan.choice)
                result.append(
                    StageCandidate(
                        layer_start=start,
                        layer_stop=stop,
                        submesh=submesh,
                        logical=logical,
                        num_microbatches=problem.num_microbatches,
                        forward_seconds=sum(r.forward_seconds for r in rows) + share / 2,
                        backward_seconds=sum(r.backward_seconds for r in rows) + share / 2,
                        step_seconds=sum(r.step_seconds for r in rows),
                        state_bytes=sum(r.state_bytes for r in rows),
                        activation_bytes=sum(r.activation_bytes for r in rows),
                        transient_bytes=max(r.transient_bytes for r in rows),
                        boundary_seconds=boundary_seconds[stop - 1] if boundary_seconds else 0.0,
                        lower_bound_seconds=min(
                            sum(r.forward_seconds + r.backward_seconds for r in rows) + share,
                            floors[names],
                        ),
                        key=" ".join(map(str, plan.choice)),
                    )
                )
    return tuple(result)


def _plans_by_memory(
    problem: HybridProblem, layers: tuple[LayerType, ...], most: int
) -> list[HybridPlan]:
    """Return the distinct best plans for 1 .. `most` microbatches in flight."""
    part = HybridProblem(
        layers=layers,
        memory=problem.memory,
        num_microbatches=problem.num_microbatches,
        transitions=problem.transitions,
    )
    plans: dict[tuple[int, ...], HybridPlan] = {}
    in_flight = 1
    while in_flight <= most:
        try:
            plan = solve_layers(part, in_flight=in_flight)
        except InfeasibleError:
            break
        plans.setdefault(plan.choice, plan)
        activation = sum(
            t.strategies[s].activation_bytes for t, s in zip(layers, plan.choice, strict=True)
        )
        # It stays the best as long as it fits, so go to the first count where it does not.
        if activation <= 0:
            break
        room = max(0.0, problem.memory - plan.bytes)
        in_flight = max(in_flight + 1, in_flight + math.floor(room / activation) + 1)
    return list(plans.values())


def _least_seconds(problem: HybridProblem, layers: tuple[LayerType, ...]) -> float:
    """Return the least forward plus backward seconds that fit with one microbatch in flight."""
    free = {
        layer.name: evolve(
            layer, strategies=tuple(evolve(s, step_seconds=0.0) for s in layer.strategies)
        )
        for layer in layers
    }
    part = evolve(problem, layers=tuple(free[layer.name] for layer in layers))
    return solve_layers(part).seconds


def _transition_seconds(
    problem: HybridProblem, layers: Sequence[LayerType], choice: Sequence[int]
) -> float:
    return sum(
        float(problem.transition(layers[k - 1], layers[k])[choice[k - 1], choice[k]])
        for k in range(1, len(layers))
    )


def _used_bytes(problem: HybridProblem, choice: Sequence[int], in_flight: int) -> float:
    rows = [t.strategies[s] for t, s in zip(problem.layers, choice, strict=True)]
    return sum(r.state_bytes + in_flight * r.activation_bytes for r in rows) + max(
        r.transient_bytes for r in rows
    )


def _rows(problem: HybridProblem, in_flight: int, transient: float) -> LayerRows | None:
    """Return the rows of strategies up to `transient` bytes; None if a layer has none."""
    names = []
    for layer in problem.layers:
        keep = [k for k, s in enumerate(layer.strategies) if s.transient_bytes <= transient]
        if not keep:
            return None
        names.append(np.array(keep, dtype=np.int64))

    def numbers(layer: LayerType, keep: NDArray[np.int64], what: str) -> Array:
        rows = [layer.strategies[int(k)] for k in keep]
        if what == "bytes":
            return np.array([r.state_bytes + in_flight * r.activation_bytes for r in rows])
        return np.array(
            [
                r.forward_seconds + r.backward_seconds + r.step_seconds / problem.num_microbatches
                for r in rows
            ]
        )

    pairs = list(zip(problem.layers, names, strict=True))
    return LayerRows(
        tuple(numbers(layer, keep, "seconds") for layer, keep in pairs),
        tuple(numbers(layer, keep, "bytes") for layer, keep in pairs),
        tuple(
            np.zeros((0, 0))
            if k == 0
            else problem.transition(problem.layers[k - 1], layer)[np.ix_(names[k - 1], keep)]
            for k, (layer, keep) in enumerate(pairs)
        ),
        tuple(names),
    )
