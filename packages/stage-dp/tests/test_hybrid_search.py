"""Per-layer strategies against brute force, alone and together with the partition."""

import itertools
import random

import numpy as np
import pytest

from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup, StageProblem
from stage_dp import (
    HybridProblem,
    InfeasibleError,
    LayerType,
    StrategyRow,
    in_flight_counts,
    segment_candidates,
    solve_layers,
    solve_stages,
    step_seconds,
)


def random_problem(rng, *, num_layers=None, microbatches=1, step=True):
    types = []
    for name in "ab":
        rows = tuple(
            StrategyRow(
                name=f"{name}{k}",
                forward_seconds=rng.uniform(0.5, 2),
                backward_seconds=rng.uniform(0.5, 2),
                step_seconds=rng.choice([0.0, 1.0]) if step else 0.0,
                state_bytes=rng.uniform(0, 3),
                activation_bytes=rng.uniform(0, 3),
                transient_bytes=rng.choice([0.0, 0.0, 1.0]),
            )
            for k in range(rng.randint(1, 3))
        )
        types.append(LayerType(name=name, strategies=rows))
    layers = tuple(rng.choice(types) for _ in range(num_layers or rng.randint(1, 5)))
    transitions = {
        (x.name, y.name): np.array(
            [[rng.choice([0.0, rng.uniform(0, 1)]) for _ in y.strategies] for _ in x.strategies]
        )
        for x in types
        for y in types
    }
    return HybridProblem(
        layers=layers,
        memory=len(layers) * rng.uniform(1, 6),
        num_microbatches=microbatches,
        transitions=transitions,
    )


def figures(problem, choice, in_flight):
    rows = [t.strategies[s] for t, s in zip(problem.layers, choice, strict=True)]
    seconds = sum(
        r.forward_seconds + r.backward_seconds + r.step_seconds / problem.num_microbatches
        for r in rows
    )
    for k in range(1, len(rows)):
        matrix = problem.transitions[problem.layers[k - 1].name, problem.layers[k].name]
        seconds += matrix[choice[k - 1], choice[k]]
    size = sum(r.state_bytes + in_flight * r.activation_bytes for r in rows)
    return seconds, size + max(r.transient_bytes for r in rows)


def brute_force(problem, in_flight):
    every = itertools.product(*(range(len(t.strategies)) for t in problem.layers))
    known = [(figures(problem, choice, in_flight), choice) for choice in every]
    fitting = [item for item in known if item[0][1] <= problem.memory]
    return min(fitting)[0][0] if fitting else None, min(size for (_, size), _ in known)


@pytest.mark.parametrize("seed", range(150))
def test_strategies_are_the_best_of_all_that_fit(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, microbatches=4)
    in_flight = rng.randint(1, 3)
    best, least = brute_force(problem, in_flight)
    if best is None:
        with pytest.raises(InfeasibleError) as caught:
            solve_layers(problem, in_flight=in_flight)
        assert caught.value.missing_bytes == pytest.approx(least - problem.memory)
        return
    plan = solve_layers(problem, in_flight=in_flight)
    assert plan.seconds == pytest.approx(best)
    assert (plan.seconds, plan.bytes) == pytest.approx(figures(problem, plan.choice, in_flight))
    assert plan.bytes <= problem.memory * (1 + 1e-9)
    assert plan.lower_bound <= best * (1 + 1e-9)


def test_identical_layers_mix_two_strategies_to_fill_the_memory():
    # Fast takes 1 s and 4 bytes, lean 2 s and 1 byte; of 10 layers in 25 bytes five can be fast.
    fast = StrategyRow(name="fast", forward_seconds=1, backward_seconds=0, state_bytes=4)
    lean = StrategyRow(name="lean", forward_seconds=2, backward_seconds=0, state_bytes=1)
    layer = LayerType(name="block", strategies=(fast, lean))
    problem = HybridProblem(layers=(layer,) * 10, memory=25.0)
    plan = solve_layers(problem)
    assert plan.names(problem).count("fast") == 5
    assert (plan.seconds, plan.bytes) == (15.0, 25.0)


def test_a_transition_between_strategies_is_paid_once_where_layers_are_alike():
    fast = StrategyRow(name="fast", forward_seconds=1, backward_seconds=0, state_bytes=4)
    lean = StrategyRow(name="lean", forward_seconds=2, backward_seconds=0, state_bytes=1)
    layer = LayerType(name="block", strategies=(fast, lean))
    change = np.array([[0.0, 0.5], [0.5, 0.0]])
    problem = HybridProblem(
        layers=(layer,) * 10, memory=25.0, transitions={("block", "block"): change}
    )
    plan = solve_layers(problem)
    assert plan.seconds == 15.5
    assert len(list(itertools.groupby(plan.choice))) == 2


@pytest.mark.parametrize("seed", range(25))
def test_partition_and_strategies_together_are_the_best_of_all(seed):
    """Every partition on equal submeshes with every choice of strategies, scored exactly."""
    rng = random.Random(seed)
    problem = random_problem(rng, num_layers=4, microbatches=3, step=False)
    submesh = SubmeshSpec(num_hosts=1, devices_per_host=1)
    logical = LogicalMesh(axes=(MeshAxis(name="data", size=1),))
    candidates = segment_candidates(problem, submesh=submesh, logical=logical)
    groups = (DeviceGroup(num_hosts=1, devices_per_host=2, memory=problem.memory),)
    best = np.inf
    for cut in range(1, 5):
        parts = [problem.layers[:cut], problem.layers[cut:]] if cut < 4 else [problem.layers]
        stages = []
        for k, part in enumerate(parts):
            held = len(parts) - k
            smaller = HybridProblem(
                layers=part,
                memory=problem.memory,
                num_microbatches=3,
                transitions=problem.transitions,
            )
            least, _ = brute_force(smaller, held)
            stages.append(np.inf if least is None else least)
        best = min(best, sum(stages) + 2 * max(stages))
    if np.isinf(best):
        if candidates:
            with pytest.raises(InfeasibleError):
                solve_stages(
                    StageProblem(num_layers=4, device_groups=groups, candidates=candidates)
                )
        return
    plan = solve_stages(StageProblem(num_layers=4, device_groups=groups, candidates=candidates))
    chain = [stage.candidate for stage in plan.stages]
    assert in_flight_counts(chain, "1f1b") == plan.in_flight
    assert step_seconds(chain, "1f1b") == pytest.approx(plan.step_seconds)
    assert plan.step_seconds <= best * (1 + 1e-9)
    assert plan.lower_bound <= plan.step_seconds


def test_equal_stretches_of_layers_give_equal_candidates():
    rng = random.Random(1)
    problem = random_problem(rng, num_layers=5, microbatches=2)
    problem = HybridProblem(layers=(problem.layers[0],) * 5, memory=1e9, num_microbatches=2)
    candidates = segment_candidates(
        problem,
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
        logical=LogicalMesh(axes=(MeshAxis(name="data", size=1),)),
        boundary_seconds=[0.1] * 5,
    )
    assert len(candidates) == 15
    assert len({(c.seconds, c.key) for c in candidates}) == 5


def test_transitions_of_the_wrong_shape_are_refused():
    row = StrategyRow(name="only", forward_seconds=1, backward_seconds=1)
    layer = LayerType(name="block", strategies=(row,))
    problem = HybridProblem(
        layers=(layer, layer), memory=1.0, transitions={("block", "block"): np.zeros((2, 1))}
    )
    with pytest.raises(ValueError, match=r"shape \(1, 1\), got shape \(2, 1\)"):
        solve_layers(problem)
