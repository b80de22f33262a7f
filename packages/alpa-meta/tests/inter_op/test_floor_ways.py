"""Floors of a layer against all its ways."""

import itertools

import numpy as np
import pytest

import ilp_sharding
from alpa_interchange import ShardingProblem
from alpa_meta.inter_op.floor_ways import LeastOfKinds, Ways
from alpa_meta.options import Options

NODES, CHOICES, PRICE = 3, 3, 0.7


def random_problem(rng):
    return ShardingProblem(
        num_strategies=[CHOICES] * NODES,
        node_cost=rng.uniform(1, 2, NODES * CHOICES),
        node_memory=np.zeros(NODES * CHOICES),
        live=np.zeros((NODES, 2), dtype=np.int64),
        edges=[(k, k + 1) for k in range(NODES - 1)],
        edge_cost=rng.uniform(0, 1, (NODES - 1) * CHOICES**2),
    )


def least_with(problem, bytes, fixed):
    """Return the least seconds with bytes at the price, of all ways."""
    ways = itertools.product(range(CHOICES), repeat=NODES)
    return PRICE * fixed + min(
        ilp_sharding.check(problem, way).cost
        + PRICE * sum(bytes[node * CHOICES + one] for node, one in enumerate(way))
        for way in ways
    )


@pytest.mark.parametrize("seed", range(10))
def test_what_kinds_not_solved_for_are_held_to_counts_no_bytes_that_they_may_not_keep(seed):
    rng = np.random.default_rng(seed)
    light, state, kept = random_problem(rng), *rng.uniform(0, 2, (2, NODES * CHOICES))
    parts = {"seconds": light, "light_step": light}
    ways = Ways(light, parts, state, 0.5, state + kept, 0.5)
    both = {"none": ways, "selective": ways}
    least = LeastOfKinds(both, [PRICE], ("seconds",), Options(), bare=True)
    held = least_with(light, state + kept, 0.5)
    assert 0.99 * held <= least.by_kind[1, 1] <= held * (1 + 1e-9)
    # One that keeps nothing has the bytes of its state, and these seconds at least.
    bare = least_with(light, state, 0.5)
    assert 0.99 * bare <= least.others[1] <= bare * (1 + 1e-9)
