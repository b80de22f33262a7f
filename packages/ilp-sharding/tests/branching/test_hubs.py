"""Branching on hubs against brute force: all choices of small random graphs, with and without
memory limits."""

import itertools

import numpy as np
import pytest

from alpa_interchange import ShardingProblem
from ilp_sharding import SolveOptions
from ilp_sharding.bound.dual_ascent import DualAscent
from ilp_sharding.bound.messages import beliefs, choice_cost, clearest
from ilp_sharding.branching.hubs import HubTree
from ilp_sharding.choice.construction import PrimalSearch
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.problem.flat_graph import table_graph
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network


def _star(seed, limited):
    """Return (graph, {choice: cost} that fit) of two hubs that share all their neighbours."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(2, 4, 8)
    edges = [(hub, i) for hub in (0, 1) for i in range(2, 8)] + [(2, 3), (4, 5)]
    tables = [rng.integers(0, 20, counts[a] * counts[b]).astype(float) for a, b in edges]
    for table in tables:
        table[rng.random(len(table)) < 0.1] = np.inf
    problem = ShardingProblem(
        num_strategies=counts,
        node_cost=rng.integers(0, 10, counts.sum()).astype(float),
        node_memory=rng.integers(1, 9, counts.sum()),
        live=np.tile([0, 2], (8, 1)),
        edges=np.array(edges),
        edge_cost=np.concatenate(tables),
        memory_limit=36 if limited else None,
    )
    instance = Instance.of(problem, SolveOptions())
    network = Network(instance)
    network.reduce()
    memory = MemoryProfile(instance, network) if limited else None
    graph = table_graph(network, memory)
    costs = {}
    if graph.num_nodes:
        primal = PrimalSearch(graph, 0)
        for choice in itertools.product(*map(range, np.diff(graph.tables.offset))):
            x = np.array(choice)
            cost = choice_cost(graph.tables, graph.tables.cost, x) + graph.constant
            if cost < np.inf and primal.left(x).min(initial=0.0) >= 0:
                costs[choice] = cost
    return graph, costs


def _trees(count):
    """Yield (case, graph, costs that fit, tree) of graphs that have a choice."""
    for seed, limited in itertools.product(range(count), (False, True)):
        try:
            graph, costs = _star(seed, limited)
        except NoAssignment:
            continue
        if not costs:
            continue
        dual = DualAscent(graph)
        for _ in range(5):
            dual.step(min(costs.values()))
        yield (seed, limited), graph, costs, HubTree(dual)


def test_the_bound_never_exceeds_the_optimum_and_never_falls():
    for case, _, costs, tree in _trees(40):
        best = min(costs.values())
        for above in (1e9, 5.0, 0.5):
            before = tree.bound
            tree.step(best + above)
            assert before <= tree.bound + 1e-9, case
            assert tree.bound <= best + 1e-9 * abs(best) or tree.done, case
        assert not tree.done, case  # the optimum is below every cutoff so far


def test_without_memory_branching_below_the_optimum_ends_with_a_proof():
    for case, _, costs, tree in _trees(40):
        if case[1]:
            continue
        best = min(costs.values())
        for _ in range(300):
            assert tree.step(best - 0.5) >= tree.bound, case
            if tree.done:
                break
        assert tree.done, case


def test_a_dive_settles_every_hub_and_keeps_a_strategy_of_every_node():
    for case, graph, costs, tree in _trees(40):
        tree.hubs = np.array([0, graph.num_nodes - 1])
        tree.step(min(costs.values()) + 5.0)
        dived = tree.dive(np.inf, lambda: False)
        offset = graph.tables.offset
        if dived is None:
            assert tree.done, case
            continue
        bound, active = dived
        left = np.add.reduceat(active.astype(int), offset[:-1])
        assert left.min() >= 1, case
        assert (left[tree.hubs] == 1).all(), case
        kept = [c for x, c in costs.items() if active[offset[:-1] + np.array(x)].all()]
        assert bound <= min(kept, default=np.inf) + 1e-6, case
        assert tree.dive(bound - 1.0, lambda: False) is None, case
        assert tree.dive(np.inf, lambda: True) is None, case


def test_the_clearest_node_is_the_one_with_the_widest_margin():
    for case, graph, _, tree in _trees(10):
        dual, offset = tree.dual, graph.tables.offset
        cost = dual.priced(dual.multipliers)
        margins, likeliest = [], []
        for node in range(graph.num_nodes):
            belief = np.empty(offset[node + 1] - offset[node])
            beliefs(graph.tables, cost, dual.to_first, dual.to_second, node, belief)
            expected = cost[offset[node] : offset[node + 1]].copy()
            for e in range(len(graph.tables.first)):
                if graph.tables.first[e] == node:
                    expected += dual.to_first[slice(*graph.tables.to_first[e : e + 2])]
                if graph.tables.second[e] == node:
                    expected += dual.to_second[slice(*graph.tables.to_second[e : e + 2])]
            assert belief == pytest.approx(expected), case
            least, second = np.sort(belief)[:2]
            margins.append(second - least)
            likeliest.append(int(np.argmin(belief)))
        waiting = np.ones(graph.num_nodes, bool)
        waiting[0] = False
        node, strategy = clearest(
            graph.tables, cost, dual.to_first, dual.to_second, dual.belief, waiting
        )
        assert margins[node] == max(margins[1:]), case
        assert strategy == likeliest[node], case
        waiting[:] = False
        assert clearest(
            graph.tables, cost, dual.to_first, dual.to_second, dual.belief, waiting
        ) == (-1, 0)
