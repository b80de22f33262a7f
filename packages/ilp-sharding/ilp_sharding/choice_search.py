"""The search for better choices, run by the workers after the first.

Until worker 0 has published memory prices, the worker finds some itself. Then it alternates between
new starts under slightly disturbed prices and ball moves on the best choice; a new start that beats
none is dropped after a while.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from ilp_sharding.dominance import simplified
from ilp_sharding.dual import DualAscent
from ilp_sharding.primal import PrimalSearch

if TYPE_CHECKING:
    from ilp_sharding.worker import Worker


def search_choices(worker: Worker) -> None:
    """Publish better and better choices until the deadline."""
    graph = worker.graph
    dual = DualAscent(graph)
    primal = PrimalSearch(graph, worker.seed)
    seconds = max(worker.until - time.perf_counter(), 0.1)
    names = worker.base_strategies(graph)
    version, active_version = 0, 0
    price = dual.price
    quick = worker.slice(0.03 * seconds)
    while time.perf_counter() < quick:
        dual.run(worker.slice(0.01 * seconds), lambda: worker.board.best, 200)
        primal.construct(dual.decoded(), dual.price)
        primal.construct(dual.backward, dual.price, polish=50)
        _publish(worker, primal)
        if not graph.num_times:
            break
    round_index = 0
    while not worker.late and not worker.board.finished:
        newer = worker.board.prices(version)
        if newer is not None:
            version = newer[0]
            price = newer[1][names]
        fewer = worker.board.active(active_version)
        if fewer is not None:
            active_version = fewer[0]
            smaller = simplified(graph, fewer[1][names], dominate=False)
            if smaller is not None and smaller.num_nodes:
                old = primal
                kept = old.x is not None and smaller.lower(graph.lift(old.x)) is not None
                position = np.searchsorted(names, worker.base_strategies(smaller))
                price = price[position]
                names = names[position]
                primal = PrimalSearch(smaller, worker.seed + round_index)
                if kept:
                    assert old.x is not None
                    lowered = smaller.lower(graph.lift(old.x))
                    assert lowered is not None
                    primal.take(lowered)
                graph = smaller
        _adopt(worker, primal)
        if primal.x is None or round_index % 4 == 3:
            _restart(worker, primal, price, round_index)
        spell = max(0.03 * seconds, 0.2)
        if round_index % 2:
            primal.improve(price, worker.slice(0.5 * spell))
        else:
            primal.oscillate(price, worker.slice(spell))
        _publish(worker, primal)
        round_index += 1


def _restart(worker: Worker, primal: PrimalSearch, price: np.ndarray, round_index: int) -> None:
    """Grow a new choice under disturbed prices and improve it for a while; keep it if it wins."""
    graph = primal.graph
    dual = DualAscent(graph)
    disturbed = price * np.exp(0.1 * primal.random.standard_normal())
    rival = PrimalSearch(graph, worker.seed + 31 * round_index + 1)
    cost = graph.tables.cost + disturbed
    for _ in range(10):
        dual.sweep(cost)
    for start in (dual.backward, dual.forward):
        rival.construct(start, disturbed, polish=100)
        if worker.late:
            return
    if rival.x is None:
        return
    seconds = max(worker.until - time.perf_counter(), 0.0)
    rival.oscillate(price, worker.slice(min(1.0 + 0.04 * seconds, seconds)))
    if rival.cost < primal.cost:
        primal.x, primal.cost = rival.x, rival.cost


def _adopt(worker: Worker, primal: PrimalSearch) -> None:
    """Take the best published choice if it is better and still in the graph."""
    if worker.board.best < primal.cost:
        found = worker.best_choice()
        if found is not None:
            lowered = primal.graph.lower(found[1])
            if lowered is not None:
                primal.take(lowered)


def _publish(worker: Worker, primal: PrimalSearch) -> None:
    if primal.x is not None and math.isfinite(primal.cost):
        worker.offer(primal.graph, primal.x, primal.cost)
