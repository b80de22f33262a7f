"""The search for better choices, run by the workers after the first.

Every time worker 0 has published memory prices, choices are grown from messages under them; the
better the bound, the better these are; each is improved as long as it is catching up with the best
-> _grow(). Between, ball moves improve the best choice.
Until the first prices arrive the worker raises multipliers of its own. What worker 0 proves
superfluous is left out as long as the best choice stays -> _State.narrow().
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from ilp_sharding.bound.dominance import simplified
from ilp_sharding.bound.dual_ascent import DualAscent
from ilp_sharding.choice.construction import PrimalSearch

if TYPE_CHECKING:
    from ilp_sharding.workers.process import Worker

_SWEEPS = 40  # at most, of messages under new prices before a choice is decoded,
_SWEEP_SHARE = 0.5  # and for this share of the time its growth takes
_SPELLS = 8  # at most, of improving a new choice, as long as each makes up
_CATCHING_UP = 0.25  # this share of its distance to the best


class _State:
    """The graph a worker searches, its best choice, messages, memory prices and their versions."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.graph = worker.graph
        self.names = worker.base_strategies(self.graph)
        self.primal = PrimalSearch(self.graph, worker.seed)
        self.dual = DualAscent(self.graph)
        self.price = np.zeros(self.graph.num_strategies)
        self.prices_seen = self.active_seen = 0

    def narrow(self) -> None:
        """Leave out what worker 0 has dropped.

        After the first time only if the best choice stays.
        """
        newer = self.worker.board.active(self.active_seen)
        if newer is None:
            return
        first = self.active_seen == 0
        self.active_seen, active = newer
        smaller = simplified(self.graph, active[self.names])
        if smaller is None or not smaller.num_nodes:
            return
        x = self.primal.x
        lowered = None if x is None else smaller.lower(self.graph.lift(x))
        if x is not None and lowered is None and not first:
            return
        names = self.worker.base_strategies(smaller)
        self.price = self.price[np.searchsorted(self.names, names)]
        random = self.primal.random
        self.graph, self.names = smaller, names
        self.primal = PrimalSearch(smaller, self.worker.seed + self.active_seen)
        self.primal.random = random
        self.dual = DualAscent(smaller)
        if lowered is not None:
            self.primal.take(lowered)

    def follow(self) -> bool:
        """Take newer prices; return whether there were any."""
        newer = self.worker.board.prices(self.prices_seen)
        if newer is None:
            return False
        self.prices_seen = newer[0]
        self.price = newer[1][self.names]
        return True


def search_choices(worker: Worker) -> None:
    """Publish better and better choices until the deadline."""
    state = _State(worker)
    seconds = max(worker.until - time.perf_counter(), 0.1)
    spell = max(0.01 * seconds, 0.1)
    round_index = 0
    while not worker.late and not worker.board.finished:
        state.narrow()
        fresh = state.follow()
        if not state.prices_seen:
            state.dual.run(worker.slice(spell), lambda: worker.board.best, 200)
            state.dual.restore()
            state.dual.priced(state.dual.best_multipliers)
            state.price = state.dual.price.copy()
        if fresh or not state.prices_seen or state.primal.x is None or round_index % 4 == 3:
            _grow(state, 0.0 if fresh else 0.05, spell)
            _publish(worker, state.primal)
        _adopt(worker, state.primal)
        if round_index % 2:
            state.primal.improve(state.price, worker.slice(spell))
        else:
            state.primal.oscillate(state.price, worker.slice(spell))
        _publish(worker, state.primal)
        round_index += 1


def _grow(state: _State, disturbance: float, seconds: float) -> None:
    """Grow a choice from messages under the prices, disturbed by about that share, and improve it
    as long as it is catching up with the best; keep it if it wins.
    """
    dual, worker = state.dual, state.worker
    rival = PrimalSearch(state.graph, int(state.primal.random.integers(2**31)))
    price = state.price * math.exp(disturbance * rival.random.standard_normal())
    cost = state.graph.tables.cost + price
    end = worker.slice(_SWEEP_SHARE * seconds)
    for _ in range(_SWEEPS if state.prices_seen else 1):
        dual.sweep(cost)
        if time.perf_counter() > end:
            break
    for start in (dual.decode(cost), dual.backward):
        if worker.late:
            break
        rival.construct(start, price, rounds=6, polish=10)
    if state.primal.x is not None and rival.cost < math.inf:
        for _ in range(_SPELLS):
            before = rival.cost
            rival.improve(price, worker.slice(seconds))
            if worker.late or before - rival.cost < _CATCHING_UP * (rival.cost - state.primal.cost):
                break
    if rival.x is not None:
        state.primal.take(rival.x)


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
