"""The multiplier ascent against the exact Lagrangian dual, and its move to a smaller graph."""

import itertools

import numpy as np
import pytest

from ilp_sharding.bound.dual_ascent import DualAscent
from ilp_sharding.bound.messages import choice_cost
from ilp_sharding.choice.construction import PrimalSearch
from ilp_sharding.problem.flat_graph import TableGraph, make_rows, make_tables


def _graph(seed, pairs, nodes=7, size=3, times=1, tightness=0.4):
    """Return a graph whose node i uses random memory at every time, and all its choices."""
    rng = np.random.default_rng(seed)
    offset = np.arange(nodes + 1) * size
    usage = rng.random((times, nodes * size))
    change = np.diff(usage, axis=0, prepend=0.0)
    strategy, time = np.meshgrid(np.arange(nodes * size), np.arange(times))
    total = usage.reshape(times, nodes, size)
    slack = (1 - tightness) * total.min(2).sum(1) + tightness * total.max(2).sum(1)
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    graph = TableGraph(
        tables=make_tables(
            offset,
            rng.random(nodes * size),
            first,
            second,
            rng.random(len(pairs) * size * size),
        ),
        rows=make_rows(nodes * size, strategy.ravel(), time.ravel(), change.ravel(), slack),
        constant=0.0,
        base_node=np.arange(nodes),
        label=np.tile(np.arange(size), nodes),
        settled=np.full(nodes, -1),
        base_time=np.arange(times),
    )
    return graph, np.array(list(itertools.product(range(size), repeat=nodes)))


def _costs_and_excess(graph, choices):
    primal = PrimalSearch(graph, 0)
    cost = np.array([choice_cost(graph.tables, graph.tables.cost, x) for x in choices])
    return cost, -np.array([primal.left(x) for x in choices])


def _best_multiplier_bound(cost, excess):
    """Return max over lambda >= 0 of min over choices of cost + lambda excess, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        if excess[np.argmin(cost + middle * excess)] > 0:
            low = middle
        else:
            high = middle
    return float((cost + high * excess).min())


def test_the_ascent_reaches_the_best_multiplier_of_a_chain_with_one_memory_row():
    chain = [(i, i + 1) for i in range(6)]
    for seed in range(20):
        graph, choices = _graph(seed, chain)
        cost, excess = _costs_and_excess(graph, choices)
        exact = _best_multiplier_bound(cost, excess[:, 0])
        dual = DualAscent(graph)
        for _ in range(400):
            dual.step(np.inf)
        assert dual.best <= exact + 1e-9 * abs(exact), seed
        assert dual.best == pytest.approx(exact, rel=1e-3), seed


def test_a_costless_minimum_does_not_stop_the_ascent():
    graph, choices = _graph(3, [])
    first = graph.tables.offset[:-1]
    graph.tables.cost[:] = np.where(np.isin(np.arange(len(graph.label)), first), 0.0, 5.0)
    cheap = PrimalSearch(graph, 0).left(np.zeros(7, np.int64)).min()
    graph.rows.slack[:] -= cheap + 0.3  # the costless choice exceeds the row
    cost, excess = _costs_and_excess(graph, choices)
    exact = _best_multiplier_bound(cost, excess[:, 0])
    dual = DualAscent(graph)
    for _ in range(400):
        dual.step(np.inf)
    assert exact > 1.0
    assert dual.best == pytest.approx(exact, rel=1e-2)
    assert dual.best <= exact * (1 + 1e-9)


def test_an_ascent_carried_to_the_same_graph_goes_on_as_before():
    pairs = [(i, j) for i in range(7) for j in range(i + 1, 7) if (i + j) % 3]
    graph, _ = _graph(1, pairs, times=3)
    dual = DualAscent(graph)
    for _ in range(60):
        dual.step(np.inf)
    other = dual.carried(graph.restricted(np.ones(graph.num_strategies, bool)))
    dual.restore()
    assert other.evaluate(other.multipliers)[0] == dual.evaluate(dual.multipliers)[0]


def test_an_ascent_carried_to_a_smaller_graph_keeps_messages_and_bounds_what_is_left():
    pairs = [(i, j) for i in range(7) for j in range(i + 1, 7) if (i + j) % 3]
    for seed in range(20):
        graph, choices = _graph(seed, pairs, times=3)
        dual = DualAscent(graph)
        for _ in range(60):
            dual.step(np.inf)
        rng = np.random.default_rng(seed)
        active = rng.random(graph.num_strategies) < 0.7
        active[graph.tables.offset[:-1] + rng.integers(0, 3, 7)] = True
        smaller = graph.restricted(active)
        other = dual.carried(smaller)
        start = other.evaluate(other.multipliers)[0]
        fresh = DualAscent(smaller).evaluate(other.multipliers)[0]
        assert start >= min(fresh, dual.best) - 0.02 * abs(fresh), seed
        cost, excess = _costs_and_excess(graph, choices)
        left = active[graph.tables.offset[:-1] + choices].all(1) & (excess <= 0).all(1)
        for _ in range(60):
            other.step(np.inf)
        assert other.best <= cost[left].min(initial=np.inf) + 1e-9, seed


def test_the_multiplier_of_a_time_left_out_goes_to_the_neighbour_that_uses_more():
    graph, _ = _graph(0, [(0, 1)], times=3)
    dual = DualAscent(graph)
    dual.step(np.inf)
    dual.best_multipliers = np.array([1.0, 2.0, 4.0])
    owner = np.repeat(np.arange(graph.num_strategies), np.diff(graph.rows.start))
    left = PrimalSearch(graph, 0).left(dual.backward)
    kept = np.array([0, 2])
    rows = make_rows(
        graph.num_strategies,
        owner,
        np.searchsorted(kept, graph.rows.time),
        graph.rows.change,
        graph.rows.slack[kept],
    )
    smaller = graph.restricted(np.ones(graph.num_strategies, bool))
    smaller.rows, smaller.base_time = rows, kept
    moved = dual.carried(smaller).multipliers
    assert moved.sum() == 7.0
    assert moved.tolist() == ([1.0, 6.0] if left[2] <= left[0] else [3.0, 4.0])
