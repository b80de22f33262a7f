"""How the seconds of a choice split into compute and the links of the mesh's axes.

Seconds of a collective are linear in the latencies and in 1 / bandwidth of the axes it runs over,
as long as its algorithm stays the best one. So a part is a derivative:

    latency part of axis a   latency_a  d seconds / d latency_a            -> LinkParts.of()
    bytes part of axis a     (1 / b_a)  d seconds / d (1 / b_a)

and the parts add up to the whole. On changed links the same strategies cost what the parts scale
to; that another algorithm or strategy may then be better is left to a new search.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray

from alpa_interchange import MeshAxis, ShardingSpec, Strategy
from alpa_meta.intra_op.bucketed_traffic import Sent, Sizes, completion_steps, conversion_steps
from alpa_meta.intra_op.equation_seconds import Priced, PricedPairs
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.stage_problem import Source
from alpa_meta.types import Ints

Array = NDArray[np.float64]  # [axes, 2] seconds: latency part, bytes part

_STEP = 1e-4  # of the differences: seconds are piecewise linear, so only rounding counts

Sends = tuple[Sent, bool, float]
"""A collective, whether it travels in a bucket, and how often it counts."""
_Entry = tuple[int, int, int, Priced, Callable[[int, int, int], Iterator[Sends]]]
"""An equation's position, its cost as two nodes and, by size, [first, second] seconds ([first] of
an operator), and what is sent under two strategies at a size."""


@define(eq=False)
class LinkParts:
    """Splits seconds on one mesh, remembered."""

    costs: MeshCosts
    _known: dict[tuple[str, float, tuple[str, ...], bool], tuple[float, Array]] = field(
        factory=dict
    )

    def collective(self, sent: Sent, in_buckets: bool) -> tuple[float, Array]:
        """Return the seconds of a collective and their parts [axes, 2]."""
        key = (*sent, in_buckets)
        known = self._known.get(key)
        if known is None:
            kind, size, names = sent
            model, group = self.costs.model, self.costs.host_group

            def seconds(axes: tuple[MeshAxis, ...]) -> float:
                if in_buckets:
                    return model.bucket_share_seconds(kind, size, axes, group)
                return float(model.collective_seconds(kind, size, axes))

            known = self._known[key] = self.of(seconds, names)
        return known

    def buckets(self, sent: Sent, sizes: Sizes) -> Array:
        """Return the parts by which buckets of tensors of `sizes` exceed their shares: [axes, 2].

        Kind and axes are those of `sent`, whose size does not count.
        """
        kind, _, names = sent
        model, group = self.costs.model, self.costs.host_group

        def beyond(axes: tuple[MeshAxis, ...]) -> float:
            shares = sum(
                count * model.bucket_share_seconds(kind, size, axes, group)
                for size, count in sizes.items()
            )
            return max(model.bucketed_seconds(kind, sizes, axes, group) - shares, 0.0)

        return self.of(beyond, names)[1]

    def of(
        self, seconds: Callable[[tuple[MeshAxis, ...]], float], names: Sequence[str]
    ) -> tuple[float, Array]:
        """Return `seconds` of the mesh's axes called `names`, and its parts [axes, 2]."""
        mesh = self.costs.mesh
        parts = np.zeros((len(mesh.axes), 2))
        axes = tuple(axis for axis in mesh.axes if axis.name in names)
        whole = seconds(axes)
        for place, axis in enumerate(axes):
            slower = (
                evolve(axis, latency=axis.latency * (1 + _STEP)),
                evolve(axis, bandwidth=axis.bandwidth / (1 + _STEP)),
            )
            for column, other in enumerate(slower):
                changed = seconds((*axes[:place], other, *axes[place + 1 :]))
                parts[mesh.axes.index(axis), column] = max((changed - whole) / _STEP, 0.0)
        return whole, parts


@define(eq=False)
class SentSeconds:
    """What each equation of a selection problem sends, as a function of the choice."""

    costs: MeshCosts
    _entries: list[_Entry] = field(factory=list)
    _shares: dict[tuple[Priced, int, int, int], Array | None] = field(factory=dict)

    def conversion(
        self,
        position: int,
        source: Source,
        node: int,
        wanted: Sequence[ShardingSpec],
        in_buckets: bool,
        seconds: Priced,
    ) -> None:
        """Note the conversion of a value for equation `position` into the spec `node` wants."""

        costs = self.costs  # not these seconds, which would live as long as their entries

        def sends(first: int, second: int, size: int) -> Iterator[Sends]:
            here, there = source.specs[first], wanted[second]
            value = evolve(source, bytes=(source.bytes, *source.other_bytes)[size])
            for sent in conversion_steps(costs, value, here, there, in_buckets):
                yield sent, in_buckets, 1.0

        assert source.node is not None
        self._entries.append((position, source.node, node, seconds, sends))

    def completion(
        self,
        position: int,
        natural: Source,
        node: int,
        finals: Sequence[ShardingSpec],
        late: bool,
        seconds: Priced,
    ) -> None:
        """Note the completion of partial sums into the spec chosen at `node`."""

        mesh = self.costs.mesh

        def sends(first: int, second: int, size: int) -> Iterator[Sends]:
            before, after = natural.specs[first], finals[second]
            bytes = (natural.bytes, *natural.other_bytes)[size]
            for sent in completion_steps(mesh, bytes, before, after):
                yield sent, late, 1.0

        assert natural.node is not None
        self._entries.append((position, natural.node, node, seconds, sends))

    def operator(
        self,
        position: int,
        node: int,
        strategies: Sequence[Strategy],
        sends_of: Sequence[Callable[[Strategy], Iterator[Sends]]],
        seconds: Priced,
    ) -> None:
        """Note the collectives inside an operator, by size."""

        def sends(chosen: int, _: int, size: int) -> Iterator[Sends]:
            return sends_of[size](strategies[chosen])

        self._entries.append((position, node, node, seconds, sends))

    def under(self, count: int, choice: Sequence[int], size: int = 0) -> Array:
        """Return [count, axes, 2] seconds per step under a choice, at one of the sizes that the
        problem is priced at."""
        found = np.zeros((count, len(self.costs.mesh.axes), 2))
        places = self._priced.places(choice)
        values = self._priced.tables[size][places]
        sent = np.flatnonzero(values)
        # Equal seconds under the same two strategies are shared alike.
        _, first, same = np.unique(places[sent], return_index=True, return_inverse=True)
        shares = [self._share_of(int(sent[k]), float(values[sent[k]]), choice, size) for k in first]
        if shares:
            np.add.at(found, self._positions[sent], np.array(shares)[same])
        return found

    def _share_of(self, number: int, value: float, choice: Sequence[int], size: int) -> Array:
        """Return the parts of an entry of `value` seconds under a choice, remembered."""
        _, first, second, priced, sends = self._entries[number]
        one, two = int(choice[first]), int(choice[second])
        key = (priced, one, two, size)
        if key not in self._shares:
            scaled = None if priced.at[0].ndim == 1 else value
            self._shares[key] = self._share(sends(one, two, size), scaled)
        share = self._shares[key]
        return np.zeros((len(self.costs.mesh.axes), 2)) if share is None else share

    @functools.cached_property
    def _positions(self) -> Ints:
        """The equations of all entries."""
        return np.array([entry[0] for entry in self._entries], dtype=np.int64)

    @functools.cached_property
    def _priced(self) -> PricedPairs:
        """The seconds of all entries, which are complete once the problem is built."""
        num_sizes = len(self._entries[0][3].at) if self._entries else 1
        return PricedPairs(num_sizes, [(first, two, p) for _, first, two, p, _ in self._entries])

    def _share(self, sends: Iterator[Sends], seconds: float | None) -> Array | None:
        """Return the parts of collectives that take `seconds` together (None: as priced alone).

        None if there are none. A conversion's seconds are scaled from a tensor of like size.
        """
        whole, total = 0.0, np.zeros((len(self.costs.mesh.axes), 2))
        for sent, in_buckets, times in sends:
            one, split = self.costs.links.collective(sent, in_buckets)
            whole += times * one
            total += times * split
        if not whole:
            return None
        if seconds is None:
            return total
        if not math.isfinite(seconds):  # of a choice that is impossible at this size
            return np.full_like(total, math.inf)
        return total * (seconds / whole)
