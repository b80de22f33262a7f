"""Message sweeps in numpy, for as long as the compiled ones of `messages` are not loaded.

The same update (TRW-S: Kolmogorov 2006, see `messages`) on the tables of a reduced network: nodes
in the order of `Network.open_nodes`, a forward sweep sends to later nodes, a backward sweep to
earlier ones. With b_i the cost of node i plus its incoming messages, n its receivers and
g = 1 / max(earlier neighbours, later neighbours),

    m_i->j(l) = min_k [ theta_ij(k, l) + g b_i(k) - m_j->i(k) ] - d,    d making its minimum 0,

and the sum of all (1 - g n) min b_i and d bounds the cost of every choice -> Sweeps.sweep(). A
sweep costs about ten microseconds per edge and a pass over the tables, so deadlines of some tens of
milliseconds get a bound and a choice from it -> swept_start().
"""

from __future__ import annotations

import math
import time

import numpy as np

from ilp_sharding.choice.first_choice import consistent_start
from ilp_sharding.methods.narrowing import loops_in_time, sweeps_fit
from ilp_sharding.methods.reduced import Reduced
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network
from ilp_sharding.search import Search
from ilp_sharding.workers.pool import WORKER_SECONDS

_PAIRS = 30  # of sweeps, forward and backward
_SWEEP_SECONDS = 1.0  # where worker processes follow
_SHARE = 0.5  # of the time left that the last choice may take


def sweeps_seconds(reduced: Reduced) -> float:
    """Return 0 where compiled sweeps would not be loaded, or not end, in time, else inf."""
    return 0.0 if sweeps_fit(reduced) and not loops_in_time(reduced) else math.inf


def sweep(reduced: Reduced) -> bool:
    """Sweep until the deadline, or for a moment where worker processes follow; prove nothing."""
    search = reduced.search
    until = search.until
    if search.seconds > WORKER_SECONDS:
        until = time.perf_counter() + min(_SWEEP_SECONDS, 0.2 * search.seconds)
    swept_start(reduced.network, search, reduced.memory, until)
    return False


class Sweeps:
    """Messages `into[i, j]` [strategies of i], what i gets from its neighbour j."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.nodes = network.open_nodes()
        place = {node: p for p, node in enumerate(self.nodes)}
        neighbours = [list(network.tables[node]) for node in self.nodes]
        self._later = [
            [other for other in near if place[other] > p] for p, near in enumerate(neighbours)
        ]
        self._earlier = [
            [other for other in near if place[other] < p] for p, near in enumerate(neighbours)
        ]
        self.into = {
            (node, other): np.zeros(len(network.cost[node]))
            for node, near in zip(self.nodes, neighbours, strict=True)
            for other in near
        }

    def sweep(self, *, forward: bool, until: float) -> float:
        """Return the bound after sending all messages one way, -inf if `until` came first."""
        network, into = self.network, self.into
        receivers = self._later if forward else self._earlier
        places = range(len(self.nodes)) if forward else reversed(range(len(self.nodes)))
        bound = network.constant()
        for place in places:
            if time.perf_counter() > until:
                return -np.inf
            node = self.nodes[place]
            belief = network.cost[node]
            for other in network.tables[node]:
                belief = belief + into[node, other]
            later, earlier = len(self._later[place]), len(self._earlier[place])
            share = 1.0 / max(later, earlier, 1)
            bound += (1.0 - share * len(receivers[place])) * float(belief.min())
            belief = share * belief
            for other in receivers[place]:
                weight = belief - into[node, other]
                message = (network.tables[other][node] + weight).min(1)
                least = message.min()
                into[other, node] = message - least
                bound += float(least)
        return bound - 1e-12 * abs(bound)


def swept_start(
    network: Network, search: Search, memory: MemoryProfile | None, until: float
) -> None:
    """Raise the bound of `search` by sweeps until `until` or they stall, and offer choices.

    Memory is not priced: the bound holds with any limit, choices keep it.
    """
    sweeps = Sweeps(network)
    if not sweeps.nodes:
        return
    best, quiet, growing = -np.inf, 0, 0.0
    for number in range(_PAIRS):
        if sweeps.sweep(forward=True, until=until) == -np.inf:
            break
        bound = sweeps.sweep(forward=False, until=until)
        search.raise_bound(bound, "sweeps")
        quiet = quiet + 1 if bound <= best + 1e-6 * abs(best) else 0
        best = max(best, bound)
        if number == 0:
            growing = _grow(network, search, memory, sweeps, until)
        if quiet == 3 or time.perf_counter() + growing / _SHARE > until:
            break
    if number and time.perf_counter() + growing < until:
        _grow(network, search, memory, sweeps, until)


def _grow(
    network: Network, search: Search, memory: MemoryProfile | None, sweeps: Sweeps, until: float
) -> float:
    """Offer the choice that the messages suggest; return the seconds it took."""
    began = time.perf_counter()
    chosen = consistent_start(network, memory, until, sweeps.into)
    if chosen is not None:
        search.offer(network.expand(chosen), "sweeps")
    return time.perf_counter() - began
