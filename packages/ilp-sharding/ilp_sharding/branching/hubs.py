"""Branch and bound over hubs, the nodes with many neighbours.

Large graphs are nearly trees once a few hubs (shared constants, residual streams, stacked
parameters) are settled, and there the messages of `messages` are nearly exact: most of the gap
between the bound and the best choice is that messages cannot agree on the hubs. So the open tree
node of least bound is split by a hub, each of its likeliest strategies alone and all others
together, memory prices kept                                                  -> HubTree.step()

Which hub: a few candidates are tried, those whose splits have raised the bound most, and others yet
untried by influence (open strategies x neighbours); the one whose least child is highest is kept.
What a trial or a reduced cost shows to be no better than the cutoff is forbidden below the tree
node.

Choices follow by diving from the tree node of least bound: the hub whose strategies differ most in
cost, as the messages tell, is settled, messages are swept again, and so on until all hubs are
settled. What is left is a graph where memory prices can rise anew                -> HubTree.dive()
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from attrs import define

from ilp_sharding.bound import messages
from ilp_sharding.bound.dual_ascent import DualAscent
from ilp_sharding.branching.best_first import BestFirst

_HUB = 4.0  # times the mean number of neighbours is what a hub has at least
_SWEEPS = 6  # of messages per tree node,
_TRIAL_SWEEPS = 4  # and per child
_FIRST = 16  # candidates at the root,
_KNOWN, _UNTRIED = 2, 1  # and below
_ALONE = 4  # strategies of a hub that get a child each
_KEPT_BYTES = 1e9  # of messages that tree nodes keep; later ones start from those of their parent
_NARROW = 1e30  # costs up to which messages are kept as float32


@define
class _Open:
    """A tree node: forbidden strategies, and messages of its parent to start from."""

    forbidden: np.ndarray
    messages: tuple[np.ndarray, np.ndarray]


class HubTree(BestFirst[_Open]):
    """A tree of restrictions of the graph of `dual`, under its best multipliers."""

    def __init__(self, dual: DualAscent) -> None:
        self.dual = dual
        dual.restore()
        graph = dual.graph
        self._priced = dual.priced(dual.multipliers)
        self._bar = 4.0 * dual.largest  # cost of forbidden strategies: finite, so messages stay so
        self._degree = np.diff(graph.tables.incident_offset)
        self.hubs = np.flatnonzero(self._degree >= _HUB * self._degree.mean())
        self._gain: dict[int, float] = {}  # average rise of the least child of a hub's splits
        self._kept_bytes = 0
        root = _Open(np.zeros(graph.num_strategies, bool), self._messages())
        super().__init__(dual.best, root)

    def step(self, cutoff: float) -> float:
        """Split the open tree node of least bound; return the bound on every choice."""
        taken = self.take(cutoff)
        if taken is None:
            return self.bound
        bound, parent = taken
        forbidden = parent.forbidden.copy()
        bound = max(bound, self._swept(forbidden, parent.messages, _SWEEPS, cutoff))
        if bound > cutoff:
            return self.bound
        value, reduced = self.dual.reduce(self._barred(forbidden))
        forbidden |= value + reduced > cutoff
        start = self._messages()
        trials = {
            hub: self._children(hub, forbidden, start, bound, cutoff)
            for hub in self._candidates(forbidden)
        }
        if not trials:
            self.keep(bound)
            return self.bound
        least = {
            hub: min((child for child, _ in children), default=math.inf)
            for hub, children in trials.items()
        }
        floor = min(least.values())
        for hub, lowest in least.items():
            rise = min(lowest, cutoff) - floor
            self._gain[hub] = 0.5 * (self._gain.get(hub, rise) + rise)
        best = trials[max(least, key=lambda hub: least[hub])]
        if self._kept_bytes > _KEPT_BYTES:
            start = parent.messages
        self._kept_bytes += start[0].nbytes + start[1].nbytes
        for child, barred in best:
            self.add(child, _Open(barred, start))
        return self.bound

    def dive(self, cutoff: float, late: Callable[[], bool]) -> tuple[float, np.ndarray] | None:
        """Return (bound, which strategies stay) when all hubs are settled below the tree node of
        least bound; None if the bound passes `cutoff`, `late` came first or no tree node is open.
        """
        node = self.least()
        if node is None:
            return None
        dual, tables = self.dual, self.dual.graph.tables
        bound = self._swept(node.forbidden, node.messages, _SWEEPS, math.inf)
        forbidden = node.forbidden.copy()
        waiting = np.zeros(dual.graph.num_nodes, bool)
        waiting[self.hubs] = True
        while bound < cutoff and not late():
            cost = self._barred(forbidden)
            hub, best = messages.clearest(
                tables, cost, dual.to_first, dual.to_second, dual.belief, waiting
            )
            if hub < 0:
                return bound, ~forbidden
            waiting[hub] = False
            begin, end = tables.offset[hub], tables.offset[hub + 1]
            forbidden[begin:end] |= np.arange(end - begin) != best
            bound = dual.sweep(self._barred(forbidden))
        return None

    def _candidates(self, forbidden: np.ndarray) -> list[int]:
        """Return the hubs to try, likely best first."""
        offset = self.dual.graph.tables.offset
        open_count = np.add.reduceat((~forbidden).astype(np.int64), offset[:-1])
        known = [hub for hub in self._gain if open_count[hub] > 1]
        known = sorted(known, key=lambda hub: -self._gain[hub])[:_KNOWN]
        influence = np.where(open_count > 1, self._degree * open_count, 0)
        influence[list(self._gain)] = 0
        untried = np.argsort(-influence, kind="stable")[: _UNTRIED if known else _FIRST]
        return known + [int(hub) for hub in untried if influence[hub] > 0]

    def _children(
        self,
        hub: int,
        forbidden: np.ndarray,
        start: tuple[np.ndarray, np.ndarray],
        floor: float,
        cutoff: float,
    ) -> list[tuple[float, np.ndarray]]:
        """Return (bound, forbidden) of the children below the cutoff; forbids what has none."""
        dual = self.dual
        tables = dual.graph.tables
        begin, end = int(tables.offset[hub]), int(tables.offset[hub + 1])
        self._load(start)
        belief = np.empty(end - begin)
        messages.beliefs(tables, self._priced, dual.to_first, dual.to_second, hub, belief)
        allowed = np.flatnonzero(~forbidden[begin:end])
        order = allowed[np.argsort(belief[allowed], kind="stable")]
        groups = [order[a : a + 1] for a in range(min(_ALONE, len(order)))]
        if len(order) > _ALONE:
            groups.append(order[_ALONE:])
        children = []
        for group in groups:
            barred = forbidden.copy()
            barred[begin:end] = True
            barred[begin + group] = False
            bound = max(floor, self._swept(barred, start, _TRIAL_SWEEPS, cutoff))
            if bound > cutoff:
                forbidden[begin + group] = True
            else:
                children.append((bound, barred))
        return children

    def _swept(
        self,
        forbidden: np.ndarray,
        start: tuple[np.ndarray, np.ndarray],
        sweeps: int,
        cutoff: float,
    ) -> float:
        """Return the bound of a restriction after some sweeps from messages `start`."""
        dual = self.dual
        self._load(start)
        cost = self._barred(forbidden)
        bound = -math.inf
        for _ in range(sweeps):
            bound = max(bound, dual.sweep(cost))
            if bound > cutoff:
                break
        return bound

    def _barred(self, forbidden: np.ndarray) -> np.ndarray:
        return np.where(forbidden, self._priced + self._bar, self._priced)

    def _messages(self) -> tuple[np.ndarray, np.ndarray]:
        """Return a copy of the messages, rounded: any messages give a bound."""
        kind = np.float32 if self.dual.largest < _NARROW else np.float64
        return self.dual.to_first.astype(kind), self.dual.to_second.astype(kind)

    def _load(self, start: tuple[np.ndarray, np.ndarray]) -> None:
        self.dual.to_first[:], self.dual.to_second[:] = start
