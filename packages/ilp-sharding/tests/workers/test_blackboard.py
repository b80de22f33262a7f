"""What workers share is what the parent stored, and nobody changes it for the others."""

import numpy as np

from ilp_sharding.problem.flat_graph import TableGraph, make_rows, make_tables
from ilp_sharding.workers.blackboard import Board, load_graph, store_graph


def _graph(size):
    rng = np.random.default_rng(0)
    offset = np.array([0, size, 2 * size])
    table = rng.random(size * size)
    return TableGraph(
        tables=make_tables(offset, rng.random(2 * size), np.array([0]), np.array([1]), table),
        rows=make_rows(2 * size, np.arange(3), np.zeros(3, int), np.ones(3), np.array([2.0])),
        constant=3.5,
        base_node=np.arange(2),
        label=np.tile(np.arange(size), 2),
        settled=np.full(2, -1),
        base_time=np.arange(1),
    )


def test_a_stored_graph_is_loaded_as_it_was(tmp_path):
    graph = _graph(400)  # its table is over a mebibyte: mapped; the rest is read
    store_graph(tmp_path, graph)
    loaded = load_graph(tmp_path)
    for part in ("tables", "rows"):
        for was, now in zip(getattr(graph, part), getattr(loaded, part), strict=True):
            assert np.array_equal(was, now)
    assert loaded.constant == 3.5
    assert np.array_equal(loaded.label, graph.label)


def test_a_change_of_a_loaded_graph_stays_private(tmp_path):
    graph = _graph(400)
    store_graph(tmp_path, graph)
    loaded = load_graph(tmp_path)
    loaded.tables.entry[:] = 0.0
    assert np.array_equal(load_graph(tmp_path).tables.entry, graph.tables.entry)


def test_readers_see_the_best_offer_and_the_best_bound(tmp_path):
    board = Board(tmp_path, 2, 4, 2, create=True)
    other = Board(tmp_path, 2, 4, 2)
    board.offer(0, 7.0, np.array([1, 0]))
    board.offer(1, 5.0, np.array([0, 1]))
    board.raise_bound(0, 3.0)
    board.raise_bound(0, 2.0)
    assert other.best == 5.0 and other.bound == 3.0
    assert other.offers() == [(5.0, 1), (7.0, 0)]
    found = other.choice(1)
    assert found is not None and found[1].tolist() == [0, 1]
