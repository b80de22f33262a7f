"""The bytes of values that layers hold, under any choice of strategies on a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from alpa_interchange import ShardingSpec
from alpa_meta.inter_op.scope_facts import Held
from alpa_meta.intra_op.selection import Selection
from alpa_meta.types import Floats, HostArray, Ints


@frozen(eq=False)
class HeldBytes:
    """Values, the same ones at every size, as they lie on a mesh.

    `nodes` [values] decide how each lies, by the `fractions` [places] from `starts` [values] on,
    one per strategy; a start of -1 is of what is whole under every choice. `sizes` [sizes, values]
    are whole bytes, `layers` [values] the layers that hold them, `counts` [values] numbers of
    strategies.
    """

    nodes: Ints
    starts: Ints
    sizes: Floats
    layers: Ints
    fractions: Floats
    counts: Ints

    @classmethod
    def of(cls, selection: Selection, held: Sequence[Held]) -> HeldBytes:
        """Return the values as they lie on the mesh of a selection problem; `held` by size."""
        nodes, places, parts = [], [], [np.ones(1)]
        starts: dict[tuple[ShardingSpec, ...], int] = {}
        length = 1
        for var in held[0].values:
            source = selection.sources.get(var)
            if source is None or source.node is None:
                nodes.append(0)
                places.append(-1)  # whole, under every choice
                continue
            if source.specs not in starts:
                parts.append(1.0 / selection.costs.parts(source.specs))
                starts[source.specs] = length
                length += len(source.specs)
            nodes.append(source.node)
            places.append(starts[source.specs])
        numbers, begins = np.array(nodes, dtype=np.int64), np.array(places, dtype=np.int64)
        counts = np.asarray(selection.problem.num_strategies)[numbers]
        return cls(
            numbers,
            begins,
            np.array([one.sizes for one in held], dtype=float),
            np.array(held[0].layers, dtype=np.int64),
            np.concatenate(parts),
            np.where(begins < 0, 1, counts),
        )

    def under(self, choice: Sequence[int], size: int) -> Floats:
        """Return [values] bytes under a choice."""
        chosen = np.array(choice, dtype=np.int64)
        at = np.where(self.starts < 0, 0, self.starts + chosen[self.nodes])
        found: Floats = self.sizes[size] * self.fractions[at]
        return found

    def by_layer(self, choice: Sequence[int], size: int, num_layers: int) -> Floats:
        """Return [layers] bytes under a choice."""
        found: HostArray = np.bincount(self.layers, self.under(choice, size), num_layers)
        return found

    def least(self, size: int) -> Floats:
        """Return [values] the least bytes under any choice."""
        starts = np.maximum(self.starts, 0)
        least = [
            float(self.fractions[start : start + count].min())
            for start, count in zip(starts.tolist(), self.counts.tolist(), strict=True)
        ]
        return np.asarray(self.sizes[size] * np.array(least))

    def by_node(self, layer: int, size: int) -> tuple[dict[int, Floats], float]:
        """Return {node: [strategies] bytes} of the values of a layer, and what no node decides."""
        found: dict[int, Floats] = {}
        rest = 0.0
        for k in np.flatnonzero(self.layers == layer).tolist():
            node, start, bytes = int(self.nodes[k]), int(self.starts[k]), float(self.sizes[size][k])
            if start < 0:
                rest += bytes
                continue
            own = bytes * self.fractions[start : start + int(self.counts[k])]
            found[node] = found[node] + own if node in found else own
        return found, rest
