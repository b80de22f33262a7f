"""What each equation of a stage costs under a choice of strategies, as arrays to gather from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, overload

import numpy as np
from attrs import frozen

from alpa_interchange import ShardingProblem
from alpa_meta.intra_op.added_costs import with_added
from alpa_meta.types import Flags, Floats, HostArray, Ints


@frozen(eq=False)
class Priced:
    """Seconds per step `at` the size that a problem is built at, then at the others it is priced
    at: one object for all equations that cost the same because they are alike."""

    at: tuple[Floats, ...]


class Edge(NamedTuple):
    """Seconds [strategies of first, of second] that an equation takes to read a value made by the
    one at `home` (itself, if that is none of these), which count `times` (`Window`)."""

    position: int
    home: int
    first: int
    second: int
    times: int
    seconds: Priced


class PricedPairs:
    """Seconds at `num_sizes` sizes that depend on the strategies of two nodes each, as arrays to
    gather from: entries are (first node, second node, [first, second] seconds, or [first])."""

    def __init__(self, num_sizes: int, entries: Sequence[tuple[int, int, Priced]]) -> None:
        self._first = np.array([one[0] for one in entries], dtype=np.int64)
        self._second = np.array([one[1] for one in entries], dtype=np.int64)
        places: dict[Priced, int] = {}
        length = 0
        start, shapes = [], []
        for _, _, priced in entries:
            place = places.get(priced)
            if place is None:
                place = places[priced] = length
                length += priced.at[0].size
            start.append(place)
            shapes.append(priced.at[0].shape)
        self.length = length  # of each table
        self._rows = np.array([s[0] for s in shapes], dtype=np.int64)
        self._stride = np.array([s[1] if len(s) > 1 else 1 for s in shapes], dtype=np.int64)
        self._paired = np.array([len(s) - 1 for s in shapes], dtype=np.int64)
        self.start = np.array(start, dtype=np.int64)
        # By size, the seconds of all that is priced, one after the other.
        self.tables = tuple(
            np.concatenate([priced.at[size].ravel() for priced in places] or [np.zeros(0)])
            for size in range(num_sizes)
        )

    def with_again(self, numbers: Sequence[int]) -> PricedPairs:
        """Return the pairs with the entries of these `numbers` once more at their end; the tables
        are the same."""
        found = copy.copy(self)
        for name in ("_first", "_second", "_rows", "_stride", "_paired", "start"):
            own = getattr(self, name)
            setattr(found, name, np.concatenate([own, own[list(numbers)]]))
        return found

    def under(self, choice: Sequence[int], size: int = 0) -> Floats:
        """Return [entries] seconds under a choice."""
        found: Floats = self.tables[size][self.places(choice)]
        return found

    def places(self, choice: Sequence[int]) -> Ints:
        """Return [entries] where in the tables their seconds under a choice are: at the same place
        those of the same seconds and strategies."""
        chosen = np.array(choice, dtype=np.int64)
        found: Ints = self.start + chosen[self._first] * self._stride
        found += chosen[self._second] * self._paired
        return found

    def shapes(self, numbers: Ints) -> Ints:
        """Return [4, numbers] of these entries: first node, second node, strategies of the first,
        of the second (of a pair; 1 where the seconds are one node's)."""
        found = (self._first, self._second, self._rows, self._stride)
        return np.array([one[numbers] for one in found])


class Tables(Sequence[Floats]):
    """By size, the seconds of all that is priced, those of several pairs one after the other: put
    together when they are asked for."""

    def __init__(self, *parts: PricedPairs) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts[0].tables)

    @overload
    def __getitem__(self, size: int) -> Floats: ...
    @overload
    def __getitem__(self, size: slice[int | None, int | None, int | None]) -> Sequence[Floats]: ...
    def __getitem__(
        self, size: int | slice[int | None, int | None, int | None]
    ) -> Floats | Sequence[Floats]:
        if isinstance(size, slice):
            return [self[k] for k in range(len(self))[size]]
        return np.concatenate([part.tables[size] for part in self._parts])


class EquationSeconds:
    """Seconds per step of `count` equations at `num_sizes` sizes, the first of which the problem
    was built at: a cost per strategy, and per pair of strategies.

    `costs` are (position of the equation, node, [strategies] seconds), `axis_bits` the mesh axes
    that strategies use, by node. `priced_edges` are those of
    the `edges`, if known: most of the bytes, and the same however layers recompute.
    """

    def __init__(
        self,
        count: int,
        num_sizes: int,
        costs: Sequence[tuple[int, int, Priced]],
        edges: Sequence[Edge],
        axis_bits: Sequence[Ints],
        priced_edges: PricedPairs | None = None,
    ) -> None:
        self.count, self.num_sizes, self.costs, self.edges = count, num_sizes, costs, edges
        self.axis_bits = axis_bits
        self._at = np.array(
            [*(one[0] for one in costs), *(one.position for one in edges)], dtype=np.int64
        )
        self._priced = PricedPairs(num_sizes, [(node, node, priced) for _, node, priced in costs])
        self.priced_edges = priced_edges or PricedPairs(
            num_sizes, [(one.first, one.second, one.seconds) for one in edges]
        )
        self._start = np.concatenate(
            [self._priced.start, self.priced_edges.start + self._priced.length]
        )
        self._home = np.array([one.home for one in edges], dtype=np.int64)
        self.tables = Tables(self._priced, self.priced_edges)

    def with_costs(self, costs: Sequence[tuple[int, int, Priced]]) -> EquationSeconds:
        """Return the seconds of equations that cost otherwise and convert as these do."""
        bits, priced = self.axis_bits, self.priced_edges
        return EquationSeconds(self.count, self.num_sizes, costs, self.edges, bits, priced)

    def with_again(
        self, costs: Sequence[tuple[int, int, Priced]], positions: Collection[int]
    ) -> EquationSeconds:
        """Return the seconds of twice as many equations, with these `costs`: those at `positions`
        convert once more what they read, as they do here."""
        numbers = [n for n, one in enumerate(self.edges) if one.position in positions]
        again = [
            self.edges[n]._replace(
                position=self.count + self.edges[n].position,
                home=self.count + self.edges[n].position,
            )
            for n in numbers
        ]
        priced = self.priced_edges.with_again(numbers)
        edges = [*self.edges, *again]
        bits = self.axis_bits
        return EquationSeconds(2 * self.count, self.num_sizes, costs, edges, bits, priced)

    def under(self, choice: Sequence[int], size: int = 0) -> Floats:
        """Return [equations] seconds under a choice."""
        priced = [part.under(choice, size) for part in (self._priced, self.priced_edges)]
        found: HostArray = np.bincount(self._at, np.concatenate(priced), self.count)
        return found

    def least(self, size: int = 0) -> Floats:
        """Return [equations] seconds that no choice can beat, without conversions."""
        known = {priced: priced.at[size].min() for priced in {one[2] for one in self.costs}}
        least = [known[priced] for _, _, priced in self.costs]
        found: HostArray = np.bincount(self._at[: len(least)], least, self.count)
        return found

    def at_size(self, problem: ShardingProblem, size: int, times: Sequence[int]) -> ShardingProblem:
        """Return the problem that these are the seconds of with those at another size; `times`: how
        often each equation counts."""

        def added(seconds: Priced) -> Floats:
            """Return by how much more the other size takes; what cannot be stays so."""
            here, there = seconds.at[0], seconds.at[size]
            finite = np.isfinite(here)
            return np.subtract(there, here, where=finite, out=np.zeros_like(here))

        return self._with(problem, added, [1.0] * self.count, times)

    def counted(
        self, problem: ShardingProblem, often: Sequence[float], times: Sequence[int]
    ) -> ShardingProblem:
        """Return the problem that these are the seconds of where each equation runs so `often` for
        each time that it ran; `times` as in `at_size`."""

        def here(seconds: Priced) -> Floats:
            return np.where(np.isfinite(seconds.at[0]), seconds.at[0], 0.0)

        return self._with(problem, here, [ratio - 1 for ratio in often], times)

    def _with(
        self,
        problem: ShardingProblem,
        added: Callable[[Priced], Floats],
        shares: Sequence[float],
        times: Sequence[int],
    ) -> ShardingProblem:
        """Return the problem with more seconds, which count by the share of each equation."""
        counts: dict[tuple[int, int, Priced], float] = {}
        for at, node, seconds in self.costs:
            key = (node, node, seconds)
            counts[key] = counts.get(key, 0.0) + shares[at] * times[at]
        for edge in self.edges:
            key = (edge.first, edge.second, edge.seconds)
            counts[key] = counts.get(key, 0.0) + shares[edge.position] * edge.times
        counts = {key: count for key, count in counts.items() if count}
        more = {seconds: added(seconds) for seconds in {of for _, _, of in counts}}
        return with_added(
            problem,
            ((first, second, count * more[of]) for (first, second, of), count in counts.items()),
        )

    def problem_of(
        self, inside: Flags, table: Floats, shares: Floats | None = None
    ) -> ShardingProblem:
        """Return what the equations `inside` [equations] choose among themselves, once each, with
        seconds like one of the `tables`, of which `shares` [equations] count (None: all): what they
        read from others costs nothing."""
        num_costs = len(self.costs)
        own = np.flatnonzero(inside[self._at[:num_costs]])
        edges = np.flatnonzero(inside[self._at[num_costs:]] & inside[self._home])
        entries = np.concatenate([own, num_costs + edges])
        parts = (self._priced.shapes(own), self.priced_edges.shapes(edges))
        first, second, rows, columns = np.concatenate(parts, axis=1)
        nodes, first, second = _numbered(first, second, len(own))
        start = self._start[entries]
        share = np.ones(len(entries)) if shares is None else shares[self._at[entries]]

        def counted(entry: Ints, place: Ints) -> Floats:
            seconds: Floats = table[start[entry] + place]
            if shares is not None:
                with np.errstate(invalid="ignore"):  # what cannot be stays so
                    shared = share[entry] * seconds
                seconds = np.where(np.isinf(seconds), seconds, shared)
            return seconds

        alone = np.flatnonzero(first == second)  # of a pair of a node and itself the diagonal
        paired = np.flatnonzero(first != second)
        counts = np.zeros(len(nodes), dtype=np.int64)
        counts[first] = rows
        counts[second[paired]] = columns[paired]
        offset = np.cumsum(counts) - counts
        number, row = _ranges(rows[alone])
        entry = alone[number]
        step = np.where(entry < len(own), 1, columns[entry] + 1)
        node_cost = np.bincount(
            offset[first[entry]] + row, counted(entry, row * step), int(counts.sum())
        )
        lower, upper = np.minimum(first, second)[paired], np.maximum(first, second)[paired]
        where, place = _first_places(lower * len(nodes) + upper)
        pairs = np.stack([lower, upper], 1)[where]
        sizes = counts[pairs[:, 0]] * counts[pairs[:, 1]]
        number, within = _ranges(rows[paired] * columns[paired])
        entry = paired[number]
        at, turned = within.copy(), np.flatnonzero((first > second)[entry])
        row, column = np.divmod(within[turned], columns[entry[turned]])
        at[turned] = column * rows[entry[turned]] + row
        edge_cost = np.bincount(
            (np.cumsum(sizes) - sizes)[place][number] + at,
            counted(entry, within),
            int(sizes.sum()),
        )
        return ShardingProblem(
            name="part",
            num_strategies=counts,
            node_cost=node_cost,
            node_memory=np.zeros(len(node_cost)),
            live=np.tile(np.array([[0, 1]], dtype=np.int64), (len(nodes), 1)),
            edges=pairs,
            edge_cost=edge_cost,
            axis_bits=np.concatenate([nodes[:0], *(self.axis_bits[n] for n in nodes.tolist())]),
            node_names=tuple(map(str, nodes.tolist())),
            strategy_names=tuple(("",) * count for count in counts.tolist()),
        )

    def between(
        self, before: Floats, after: Floats, table: Floats
    ) -> list[tuple[int, int, Floats]]:
        """Return what equations `before` and `after` [equations] read from one another, with
        seconds like one of the `tables`: node before, node after, [before, after] seconds."""
        found = []
        starts = self._start[len(self.costs) :].tolist()
        for edge, start in zip(self.edges, starts, strict=True):
            shape, size = edge.seconds.at[0].shape, edge.seconds.at[0].size
            matrix = table[start : start + size].reshape(shape)
            if before[edge.home] and after[edge.position]:
                found.append((edge.first, edge.second, matrix))
            elif after[edge.home] and before[edge.position]:
                found.append((edge.second, edge.first, matrix.T))
        return found


def _numbered(first: Ints, second: Ints, num_alone: int) -> tuple[Ints, Ints, Ints]:
    """Return the nodes of entries in the order in which these name them, and their places there:
    [entries] of `first` and of `second`, the first `num_alone` entries being of one node each."""
    named = np.concatenate([first[:num_alone], np.stack([first, second], 1)[num_alone:].ravel()])
    where, places = _first_places(named)
    pairs = places[num_alone:].reshape(-1, 2)
    one, two = (np.concatenate([places[:num_alone], column]) for column in pairs.T)
    return named[where], one, two


def _first_places(values: Ints) -> tuple[Ints, Ints]:
    """Return where each distinct value comes first, in order, and the number that each value has
    among these."""
    _, where, place = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(where)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return where[order], rank[place]


def _ranges(sizes: Ints) -> tuple[Ints, Ints]:
    """Return, for ranges of these sizes one after the other, the number of the range and the place
    in it."""
    number = np.repeat(np.arange(len(sizes)), sizes)
    return number, np.arange(len(number)) - (np.cumsum(sizes) - sizes)[number]
