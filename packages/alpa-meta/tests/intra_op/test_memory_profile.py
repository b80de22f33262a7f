"""Memory over time against a sum over values at every time, and as rows of a problem."""

import itertools

import numpy as np
import pytest

import ilp_sharding
from alpa_interchange import LogicalMesh, MeshAxis, ShardingProblem, ShardingSpec
from alpa_meta.intra_op.liveness import KINDS, Span
from alpa_meta.intra_op.memory_profile import Copy, MemoryProfile, limited_problem
from alpa_meta.intra_op.stage_problem import Source

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=4, bandwidth=1e9, latency=1e-6),))
SPECS = (ShardingSpec(((),)), ShardingSpec((("x",),)))
NODES, TIMES = 4, 6


def random_profile(seed):
    random = np.random.default_rng(seed)
    spans = []
    for _ in range(12):
        start, stop = sorted(random.choice(TIMES + 1, 2, replace=False))
        node = int(random.integers(NODES + 1))
        specs = SPECS if node < NODES else SPECS[:1]
        source = Source(None if node == NODES else node, specs, (8,), float(random.integers(1, 99)))
        spans.append(Span(source, int(start), int(stop), int(random.integers(len(KINDS)))))
    copies = [
        Copy(2, 4, 0, 1, np.array([[0.0, 25.0], [0.0, 0.0]])),
        Copy(1, 5, 2, 1, np.array([[0.0, 0.0], [40.0, 0.0]])),
        Copy(3, 4, 3, 3, np.array([[0.0, 9.0], [9.0, 30.0]])),
    ]
    return spans, copies, MemoryProfile(spans, copies, MESH, [2] * NODES, TIMES)


def by_hand(spans, copies, choice, time):
    total = 0.0
    for span in spans:
        if span.start <= time < span.stop:
            cut = span.source.node is not None and choice[span.source.node] == 1
            total += span.source.bytes / (4 if cut else 1)
    for copy in copies:
        if copy.start <= time < copy.stop:
            total += copy.bytes[choice[copy.first], choice[copy.second]]
    return total


@pytest.mark.parametrize("seed", range(4))
def test_usage_is_the_sum_of_what_lives_at_each_time(seed):
    spans, copies, profile = random_profile(seed)
    for choice in itertools.product(range(2), repeat=NODES):
        expected = [by_hand(spans, copies, choice, time) for time in range(TIMES)]
        assert profile.usage(choice).sum(axis=0) == pytest.approx(expected)
        assert profile.peak(choice).total == pytest.approx(max(expected))


def test_a_value_converted_to_one_spec_for_two_readers_is_held_from_the_first_to_the_last():
    specs = np.array([7, 8])
    copies = [
        Copy(1, 2, 0, 1, np.array([[0.0, 25.0], [40.0, 0.0]]), one_of=0, specs=specs),
        Copy(4, 5, 0, 2, np.array([[0.0, 25.0], [40.0, 0.0]]), one_of=0, specs=specs),
    ]
    nothing = [Span(Source(None, SPECS[:1], (8,), 0.0), 0, TIMES, 0)]
    profile = MemoryProfile(nothing, copies, MESH, [2] * NODES, TIMES)
    held = [profile.usage(choice).sum(axis=0).tolist() for choice in ((0, 1, 1, 0), (0, 1, 0, 0))]
    assert held[0] == [0, 25, 25, 25, 25, 0]
    assert held[1] == [0, 25, 0, 0, 0, 0]  # the second reader takes the value as it is
    assert profile.usage((1, 0, 1, 0)).sum(axis=0).tolist() == [0, 40, 0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(6))
def test_a_limited_problem_allows_exactly_the_choices_that_fit_at_its_times(seed):
    spans, copies, profile = random_profile(seed)
    cost = np.random.default_rng(seed).integers(1, 50, 2 * NODES).astype(float)
    problem = ShardingProblem(
        num_strategies=[2] * NODES,
        node_cost=cost,
        node_memory=np.zeros(2 * NODES),
        live=[[0, 1]] * NODES,
        edges=np.zeros((0, 2)),
        edge_cost=np.zeros(0),
    )
    times = {1: 0.0, 3: 7.0, 4: 0.0}
    limit = 0.6 * max(by_hand(spans, copies, (0,) * NODES, time) for time in times)
    fits = {
        choice: sum(cost[2 * node + one] for node, one in enumerate(choice))
        for choice in itertools.product(range(2), repeat=NODES)
        if all(by_hand(spans, copies, choice, t) + extra <= limit for t, extra in times.items())
    }
    solution = ilp_sharding.solve(limited_problem(problem, profile, times, limit))
    if fits:
        assert solution.objective == pytest.approx(min(fits.values()))
        assert solution.choice is not None and solution.choice[:NODES] in fits
    else:
        assert solution.status == "infeasible"
