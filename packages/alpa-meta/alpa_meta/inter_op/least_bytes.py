"""The least bytes that a layer holds on a mesh, whatever its strategies.

Each value counts at the least of any of its strategies: bytes at one time are no less than their
sum, and the most at any time no less than the most of these sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from alpa_meta.intra_op.liveness import KINDS, PHASES
from alpa_meta.types import Floats

if TYPE_CHECKING:
    from alpa_meta.inter_op.layer_costs import LayerCosts


ByNode = tuple[dict[int, Floats], float]
"""{node: [strategies] bytes}, and what no node decides."""


class LeastBytes:
    """The least bytes of the layers of `costs`, by layer and place of the size."""

    def __init__(self, costs: LayerCosts) -> None:
        self.costs = costs
        self._kept: dict[int, dict[int, ByNode]] = {}  # by size and layer
        self._transient: dict[tuple[str, int], Floats] = {}

    def kept(self, layer: int, kind: str, size: int = 0) -> float:
        """Return the least bytes that one microbatch keeps of a layer."""
        return _least(self.kept_by_node(layer, kind, size))

    def kept_by_node(self, layer: int, kind: str, size: int = 0) -> ByNode:
        """Return {node: [strategies] bytes} that one microbatch keeps of a layer, and what no node
        decides."""
        costs = self.costs
        if kind == "none" and not costs.facts.scope.eqns.kept:
            return self._alive(size).get(layer, ({}, 0.0))
        held = costs.held["activations"] if kind == "none" else costs.recomputed(kind).kept
        return held.by_node(layer, size)

    def delayed(self, layer: int, kind: str, size: int = 0) -> float:
        """Return the least bytes that a microbatch keeps of a layer besides while its backward by
        weight waits."""
        costs = self.costs
        held = costs.held["delayed"] if kind == "none" else costs.recomputed(kind).delayed
        return _least(held.by_node(layer, size))

    def waiting(self, layer: int, kind: str, size: int = 0) -> float:
        """Return the least bytes that a microbatch keeps of a layer while its backward by weight
        waits."""
        costs = self.costs
        held = costs.held["waiting"] if kind == "none" else costs.recomputed(kind).waiting
        return _least(held.by_node(layer, size))

    def transient(self, layer: int, kind: str, size: int = 0) -> float:
        """Return the least temporaries of a layer at the time of most, of its passes."""
        if (kind, size) not in self._transient:
            self._transient[kind, size] = self._most_temporaries(kind, size)
        return float(self._transient[kind, size][layer])

    def _most_temporaries(self, kind: str, size: int) -> Floats:
        """Return [layers] the most temporaries at a time."""
        costs, facts = self.costs, self.costs.facts
        usage = costs.selection.memory.least_usage(size)
        working = costs.working(usage[KINDS.index("temporaries")])
        if kind != "none":
            of_kind = costs.recomputed(kind)
            working = working + costs.alive(of_kind.redone, of_kind.made.least(size))
        found = np.zeros(costs.num_layers)
        passes = facts.phases != PHASES.index("update")
        np.maximum.at(found, facts.layers[passes], working[passes])
        return found

    def _alive(self, size: int) -> dict[int, ByNode]:
        """Return by layer the bytes of activations that are in memory, where both passes are one
        program, when most of them are at least."""
        if size not in self._kept:
            costs, memory = self.costs, self.costs.selection.memory
            spans = [
                (number, one.start, one.stop, one.count, least)
                for number, (one, least) in enumerate(
                    zip(memory.spans, memory.least(size).tolist(), strict=True)
                )
                if one.kind == KINDS.index("activations")
            ]
            number, start, stop, count, least = np.array(spans, dtype=float).reshape(-1, 5).T
            alive = [float(least[(start <= t) & (t < stop)].sum()) for t in start]
            at = start[int(np.argmax(alive))] if alive else 0.0
            held = (start <= at) & (at < stop)
            made = np.searchsorted(np.array(costs.selection.times), start[held], side="right") - 1
            found: dict[int, ByNode] = {}
            layers = costs.facts.layers[np.maximum(made, 0)].tolist()
            for layer, span, times in zip(
                layers, number[held].tolist(), count[held].tolist(), strict=True
            ):
                by_node, rest = found.get(layer, ({}, 0.0))
                node, bytes = memory.of_span(int(span), size)
                each = bytes / times
                if node is None:
                    rest += float(each[0])
                else:
                    by_node[node] = by_node[node] + each if node in by_node else each
                found[layer] = by_node, rest
            self._kept[size] = found
        return self._kept[size]


def _least(held: ByNode) -> float:
    by_node, rest = held
    return rest + sum(float(one.min()) for one in by_node.values())
