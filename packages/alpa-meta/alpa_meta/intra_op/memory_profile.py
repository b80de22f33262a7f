"""The memory of a stage over time, under a choice of strategies and as constraints on it.

    usage(t) = sum over values that live at t of their bytes on a device under the choice
             + converted copies at t, whose bytes depend on two choices at once

The first sum is linear in the choice; a copy becomes so by a node of its own. Both can be a row of
the selection problem at any time t (`limited_problem`). There are thousands of times, so only those
at which some choice peaked are made rows (`memory_limit.solve_within`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from attrs import evolve, frozen

from alpa_interchange import LogicalMesh, ShardingProblem, ShardingSpec
from alpa_meta.intra_op.liveness import KINDS, Span
from alpa_meta.types import Floats, HostArray, Ints

LEAST_COPY = 1e-3  # of the limit, from which a converted copy is part of a limited problem


@frozen(eq=False)
class Copy:
    """A converted copy that lives over [start, stop): `bytes` [strategies of first, of second].

    `ratios`: how many times as many bytes it takes at each of the other sizes. Copies that are
    `one_of` the same value are one where they are made in the same spec: `specs` [strategies of
    second] are their numbers.
    """

    start: int
    stop: int
    first: int
    second: int
    bytes: Floats
    ratios: tuple[float, ...] = ()
    one_of: int | None = None
    specs: Ints | None = None


@frozen
class Peak:
    """Where memory peaks under a choice: the time, and bytes per device by kind."""

    time: int
    bytes: tuple[float, ...]  # as KINDS; copies are temporaries

    @property
    def total(self) -> float:
        """Bytes per device."""
        return sum(self.bytes)

    def by_kind(self) -> dict[str, float]:
        """Return {kind: bytes}."""
        return dict(zip(KINDS, self.bytes, strict=True))


class MemoryProfile:
    """Memory of the values of one stage on one mesh: when they live, bytes per strategy."""

    def __init__(
        self,
        spans: Sequence[Span],
        copies: Sequence[Copy],
        mesh: LogicalMesh,
        num_strategies: Sequence[int],
        num_times: int,
        num_others: int = 0,
    ) -> None:
        """`num_others`: how many other sizes the bytes of the values are known at."""
        self.num_times = num_times
        self._counts = np.array([*num_strategies, 1], dtype=np.int64)
        self._copies = tuple(copies)
        self._copy_table = np.concatenate([copy.bytes.ravel() for copy in copies] or [np.zeros(1)])
        sizes = np.array([copy.bytes.size for copy in copies], dtype=np.int64)
        self._copy_place = np.cumsum(sizes) - sizes
        self._copy_at = np.array(
            [(c.first, c.second, c.bytes.shape[1], c.start, c.stop) for c in copies], dtype=np.int64
        ).reshape(-1, 5)
        others = [copy.ratios or (1.0,) * num_others for copy in copies]
        self._copy_ratio = np.array([(1.0, *ratios) for ratios in others]).reshape(
            -1, 1 + num_others
        )
        self._one_of = _OneOf.found(copies)
        tables: list[list[Floats]] = [[] for _ in range(1 + num_others)]
        places: dict[tuple[tuple[ShardingSpec, ...], tuple[float, ...]], int] = {}
        fractions: dict[tuple[ShardingSpec, ...], Floats] = {}
        length = 0
        fixed = len(num_strategies)
        node, offset = [], []
        for span in spans:
            source = span.source
            kept = source.specs
            every = (source.bytes, *(source.other_bytes or num_others * (source.bytes,)))
            size = tuple([span.count * one for one in every])
            if (kept, size) not in places:
                if kept not in fractions:
                    parts = [mesh.size(tuple(a for d in s.dims for a in d)) for s in source.specs]
                    fractions[kept] = 1.0 / np.array(parts, dtype=float)
                for table, one in zip(tables, size, strict=True):
                    table.append(one * fractions[kept])
                places[kept, size] = length
                length += len(source.specs)
            offset.append(places[kept, size])
            node.append(fixed if source.node is None else source.node)
        self.spans = tuple(spans)
        self._tables = tuple(np.concatenate([*table, np.zeros(0)]) for table in tables)
        self._table = self._tables[0]
        self._node = np.array(node, dtype=np.int64)
        self._offset = np.array(offset, dtype=np.int64)
        self._start = np.array([span.start for span in spans], dtype=np.int64)
        self._stop = np.array([span.stop for span in spans], dtype=np.int64)
        self._kind = np.array([span.kind for span in spans], dtype=np.int64)

    def usage(self, choice: Sequence[int], size: int = 0) -> Floats:
        """Return [kinds, times] bytes per device under a choice; copies are temporaries.

        `size`: 0 is that of the problem, then come the others.
        """
        usage = self._over_time(self._held(choice, size))
        usage[KINDS.index("temporaries")] += self._copied(choice, size)
        return usage

    def least_usage(self, size: int = 0) -> Floats:
        """Return [kinds, times] bytes per device that no choice takes less of: each value at its
        least, without copies."""
        return self._over_time(self.least(size))

    def _over_time(self, held: Floats) -> Floats:
        """Return [kinds, times] the sums of the bytes of spans."""
        times = self.num_times + 1
        row = self._kind * times
        begins = np.bincount(row + self._start, held, len(KINDS) * times)
        ends = np.bincount(row + np.minimum(self._stop, times - 1), held, len(KINDS) * times)
        usage: Floats = np.cumsum((begins - ends).reshape(len(KINDS), -1), axis=1)[:, :-1]
        return usage

    def least(self, size: int = 0) -> Floats:
        """Return [spans] the least bytes per device of each under any strategy."""
        table, counts = self._tables[size], self._counts[self._node]
        found: Floats = np.array(
            [
                table[start : start + count].min()
                for start, count in zip(self._offset.tolist(), counts.tolist(), strict=True)
            ]
        )
        return found

    def of_span(self, number: int, size: int = 0) -> tuple[int | None, Floats]:
        """Return the node that decides the bytes of a span, None if none does, and these bytes per
        device: [strategies]."""
        node, start = int(self._node[number]), int(self._offset[number])
        bytes = self._tables[size][start : start + int(self._counts[node])]
        return (node if node < len(self._counts) - 1 else None), bytes

    def peak(self, choice: Sequence[int]) -> Peak:
        """Return where and what the most memory is under a choice."""
        return self.peak_of(self.usage(choice))

    @staticmethod
    def peak_of(usage: Floats) -> Peak:
        """Return where and what the most memory is, of [kinds, times] bytes."""
        time = int(np.argmax(usage.sum(axis=0)))
        return Peak(time, tuple(float(part) for part in usage[:, time]))

    def row(self, time: int) -> tuple[Floats, float]:
        """Return [all strategies of all nodes] bytes at `time`, and the bytes of no node."""
        live = np.flatnonzero((self._start <= time) & (time < self._stop))
        first = np.concatenate([[0], np.cumsum(self._counts)])
        row = np.zeros(int(first[-1]))
        grouped: dict[tuple[int, int], int] = {}
        for node, offset in zip(self._node[live].tolist(), self._offset[live].tolist()):
            grouped[node, offset] = grouped.get((node, offset), 0) + 1
        for (node, offset), count in grouped.items():
            size = int(self._counts[node])
            row[first[node] : first[node + 1]] += count * self._table[offset : offset + size]
        for copy in self._copies:
            if copy.first == copy.second and copy.start <= time < copy.stop:
                row[first[copy.first] : first[copy.first + 1]] += np.diagonal(copy.bytes)
        return row[:-1], float(row[-1])

    def copies_at(self, times: Sequence[int], least: float) -> Iterator[tuple[Copy, int, int]]:
        """Yield the copies of two different choices that may take `least` bytes or more at one of
        the increasing `times`, and the range of those times that they live at.
        """
        for copy in self._copies:
            start, stop = bisect_left(times, copy.start), bisect_left(times, copy.stop)
            if start < stop and copy.first != copy.second and copy.bytes.max() >= least:
                yield copy, start, stop

    def _held(self, choice: Sequence[int], size: int) -> Floats:
        chosen = np.array([*choice, 0], dtype=np.int64)
        held: Floats = self._tables[size][self._offset + chosen[self._node]]
        return held

    def _copied(self, choice: Sequence[int], size: int) -> Floats:
        first, second, width, start, stop = self._copy_at.T
        chosen, times = np.array([*choice, 0], dtype=np.int64), self.num_times + 1
        sizes = self._copy_table[self._copy_place + chosen[first] * width + chosen[second]]
        sizes = sizes * self._copy_ratio[:, size]
        if self._one_of is not None:
            stop = self._one_of.join(sizes, stop, chosen[second])
        changes: HostArray = np.bincount(start, sizes, times)
        changes -= np.bincount(np.minimum(stop, times - 1), sizes, times)
        copied: Floats = np.cumsum(changes)[:-1]
        return copied


@frozen(eq=False)
class _OneOf:
    """Copies that are one with others, `places`, where they are made in the same spec: `value` is
    equal for those of one value, `specs[first + choice of the reader]` the spec."""

    places: Ints
    value: Ints
    specs: Ints
    first: Ints

    @classmethod
    def found(cls, copies: Sequence[Copy]) -> _OneOf | None:
        """Return those of `copies` that others are one with, None if there are none."""
        number = Counter(copy.one_of for copy in copies)
        chosen = [
            (place, copy.one_of, copy.specs)
            for place, copy in enumerate(copies)
            if copy.one_of is not None and copy.specs is not None and number[copy.one_of] > 1
        ]
        if not chosen:
            return None
        places, values, specs = zip(*chosen, strict=True)
        lengths = np.array([len(one) for one in specs], dtype=np.int64)
        first = np.cumsum(lengths) - lengths
        return cls(np.array(places), np.array(values), np.concatenate(specs), first)

    def join(self, sizes: Floats, stop: Ints, chosen: Ints) -> Ints:
        """Set the `sizes` of all but the first of the copies that are one to 0, and return when
        each copy ends: that one with the last of them. `chosen` are the choices of the readers."""
        made = sizes[self.places] > 0
        places = self.places[made]
        specs = self.specs[self.first[made] + chosen[places]]
        keys = np.stack([self.value[made], specs])
        _, begun, group = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        last = np.zeros(len(begun), dtype=np.int64)
        np.maximum.at(last, group.ravel(), stop[places])
        size = sizes[places[begun]]
        sizes[places] = 0.0
        sizes[places[begun]] = size
        joined = stop.copy()
        joined[places[begun]] = last
        return joined


def limited_problem(
    problem: ShardingProblem,
    profile: MemoryProfile,
    reserved: Mapping[int, float],
    limit: float,
) -> ShardingProblem:
    """Return `problem` with at most `limit` bytes at each of the times of `reserved`.

    `reserved[t]` bytes are taken at t whatever is chosen. What a node holds at all times is its
    own memory; what it holds more at one of them is that of an added node that must choose alike.
    A copy is an added node too: its strategies are those of its reader, each without and with a
    copy, and the first are forbidden where the value comes in a spec that has to be converted.
    """
    times = sorted(reserved)
    always, added = _additions(problem, profile, times, limit)
    edges, edge_cost = [], []
    for number, one in enumerate(added):
        for node, cost in one.edges:
            edges.append((node, problem.num_nodes + number))
            edge_cost.append(cost.ravel())
    live = [(one.start, one.stop) for one in added]
    memory = [
        one.memory + (reserved[times[one.start]] if one.follows is None else 0.0) for one in added
    ]
    sizes = [len(one.memory) for one in added]
    always_live = np.tile([[0, len(times)]], (problem.num_nodes, 1))
    return evolve(
        problem,
        num_strategies=np.concatenate([problem.num_strategies, sizes]),
        node_cost=np.concatenate([problem.node_cost, np.zeros(sum(sizes))]),
        node_memory=np.concatenate([always, *memory]),
        live=np.concatenate([always_live, live]),
        edges=np.concatenate([problem.edges.reshape(-1, 2), np.reshape(edges, (-1, 2))]),
        edge_cost=np.concatenate([problem.edge_cost, *edge_cost]),
        axis_bits=None,  # looked at without a limit only
        memory_limit=limit,
        node_names=(),
        strategy_names=(),
    )


def extended_choice(
    problem: ShardingProblem,
    profile: MemoryProfile,
    times: Collection[int],
    limit: float,
    choice: Sequence[int],
) -> tuple[int, ...]:
    """Return `choice` with what follows from it at the nodes that `limited_problem` adds."""
    _, added = _additions(problem, profile, sorted(times), limit)
    return (*choice, *(one.chosen(choice) for one in added))


@frozen(eq=False)
class _Addition:
    """A node that a limited problem has more; it lives at the rows [start, stop).

    It chooses as the node it `follows`, if any; or half its strategies are those of that node with
    the `copy`.
    """

    memory: Floats
    start: int
    stop: int
    edges: tuple[tuple[int, Floats], ...] = ()
    follows: int | None = None
    copy: Copy | None = None

    def chosen(self, choice: Sequence[int]) -> int:
        if self.follows is None:
            return 0
        chosen = choice[self.follows]
        if self.copy is None or not self.copy.bytes[choice[self.copy.first], chosen]:
            return chosen
        return chosen + len(self.memory) // 2


def _additions(
    problem: ShardingProblem, profile: MemoryProfile, times: Sequence[int], limit: float
) -> tuple[Floats, list[_Addition]]:
    """Return the bytes that strategies hold at all `times`, and the nodes for what is more."""
    rows = [profile.row(time) for time in times]
    always: Floats = np.stack([row for row, _ in rows]).min(axis=0)
    counts = problem.num_strategies
    first = np.concatenate([[0], np.cumsum(counts)])
    added = []
    for number, (row, fixed) in enumerate(rows):
        added.append(_Addition(np.array([fixed]), number, number + 1))
        excess = row - always
        for node in np.flatnonzero(np.add.reduceat(excess, first[:-1]) > 0).tolist():
            alike = np.where(np.eye(int(counts[node]), dtype=bool), 0.0, np.inf)
            held = excess[first[node] : first[node + 1]]
            added.append(_Addition(held, number, number + 1, ((node, alike),), node))
    for copy, start, stop in profile.copies_at(times, LEAST_COPY * limit):
        sizes = copy.bytes.max(axis=0)
        alike = np.where(np.eye(len(sizes), dtype=bool), 0.0, np.inf)
        without = np.where(copy.bytes > 0, np.inf, 0.0)
        edges = (
            (copy.first, np.hstack([without, np.zeros_like(without)])),
            (copy.second, np.hstack([alike, alike])),
        )
        memory = np.concatenate([np.zeros(len(sizes)), sizes])
        added.append(_Addition(memory, start, stop, edges, copy.second, copy))
    return always, added
