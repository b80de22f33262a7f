import itertools

import numpy as np
import pytest

from ilp_sharding.bound import pruned_sweeps as sweeps
from ilp_sharding.problem.flat_graph import TableGraph, make_rows, make_tables


def _graph(seed, nodes=6, size=3, forbidden=0.0):
    rng = np.random.default_rng(seed)
    pairs = [(i, j) for i in range(nodes) for j in range(i + 1, nodes) if rng.random() < 0.6]
    entry = rng.random(len(pairs) * size * size)
    entry[rng.random(len(entry)) < forbidden] = np.inf
    none = np.zeros(0, dtype=np.int64)
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return TableGraph(
        tables=make_tables(
            np.arange(nodes + 1) * size,
            rng.random(nodes * size),
            first,
            second,
            entry,
        ),
        rows=make_rows(nodes * size, none, none, np.zeros(0), np.zeros(0)),
        constant=0.5,
        base_node=np.arange(nodes),
        label=np.tile(np.arange(size), nodes),
        settled=np.full(nodes, -1),
        base_time=none,
    )


def _costs(tables, constant):
    """Return {choice: cost} of all choices."""
    sizes = np.diff(tables.offset)
    found = {}
    for choice in itertools.product(*map(range, sizes)):
        x = np.array(choice, dtype=np.int64)
        places = x[tables.first] * sizes[tables.second] + x[tables.second]
        pairs = tables.entry[tables.entry_offset[:-1] + places]
        found[choice] = float(constant + tables.cost[tables.offset[:-1] + x].sum() + pairs.sum())
    return found


def _kept(rest, active):
    return sweeps.keep(rest, active), rest


@pytest.mark.parametrize("keep", [_kept, sweeps.part_of])
@pytest.mark.parametrize("forbidden", [0.0, 0.2])
def test_what_is_kept_has_the_costs_of_its_choices(forbidden, keep):
    kept = 0
    for seed in range(60):
        graph = _graph(seed, forbidden=forbidden)
        costs = _costs(graph.tables, graph.constant)
        rng = np.random.default_rng(seed)
        active = rng.random(graph.num_strategies) < 0.6
        rest = sweeps.rest_of(graph)
        some, rest = keep(rest, active.copy())
        mine = {
            choice: cost
            for choice, cost in costs.items()
            if cost < np.inf and active[graph.tables.offset[:-1] + np.array(choice)].all()
        }
        if not some:
            assert not mine, seed
            continue
        left = sweeps.graph_of(rest)
        found = {
            tuple(left.lift(np.array(x, dtype=np.int64)).tolist()): cost
            for x, cost in _costs(left.tables, left.constant).items()
            if cost < np.inf
        }
        assert found == pytest.approx(mine), seed
        kept += len(found)
    assert kept > 100


@pytest.mark.parametrize("forbidden", [0.0, 0.1, 0.3, 0.4])
def test_a_climb_bounds_the_optimum_and_keeps_its_choice(forbidden):
    proved = 0
    for seed in range(80):
        graph = _graph(seed, forbidden=forbidden)
        best = min(_costs(graph.tables, graph.constant).values())
        rest = sweeps.rest_of(graph)
        if not sweeps.keep(rest, np.ones(graph.num_strategies, bool)):
            assert best == np.inf, seed
            continue
        ended = sweeps.climb(rest, 2 if seed % 2 else 20, np.inf)
        objective = rest.numbers[sweeps.OBJECTIVE]
        assert min(rest.numbers[sweeps.BOUND], objective) <= best + 1e-9, seed
        assert objective >= best - 1e-9, seed
        assert ended != sweeps.EMPTY, seed
        if ended == sweeps.PROVED:
            assert best < np.inf, seed
            assert objective == pytest.approx(best), seed
            proved += 1
        else:  # the best choice is the known one, or is left
            left = sweeps.graph_of(rest)
            rests = _costs(left.tables, left.constant).values()
            assert min(*rests, objective) == pytest.approx(best), seed
    assert proved > 10


def test_a_climb_under_a_ceiling_says_when_no_choice_is_below_it():
    for seed in range(30):
        graph = _graph(seed)
        best = min(_costs(graph.tables, graph.constant).values())
        rest = sweeps.rest_of(graph)
        ended = sweeps.climb(rest, 40, 0.5 * best)
        assert ended in (sweeps.EMPTY, sweeps.PROVED), seed
        rest = sweeps.rest_of(graph)
        assert sweeps.climb(rest, 40, best + 1e-9) != sweeps.EMPTY, seed
