"""The least bytes that a layer holds on a mesh, whatever its strategies.

Each value counts at the least of any of its strategies: bytes at one time are no less than their
sum, and the most at any time no less than the most of these sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from alpa_meta.intra_op.liveness import KINDS, PHASES

if TYPE_CHECKING:
    from alpa_meta.inter_op.held_bytes import HeldBytes
    from alpa_meta.inter_op.layer_costs import LayerCosts


class LeastBytes:
    """The least bytes of the layers of `costs`, by layer and place of the size."""

    def __init__(self, costs: LayerCosts) -> None:
        self.costs = costs
        self._kept: dict[int, np.ndarray] = {}
        self._transient: dict[tuple[str, int], np.ndarray] = {}

    def kept(self, layer: int, kind: str, size: int = 0) -> float:
        """Return the least bytes that one microbatch keeps of a layer."""
        costs = self.costs
        if kind == "none" and not costs.facts.scope.eqns.kept:
            return float(self._alive(size)[layer])
        held = costs.held["activations"] if kind == "none" else costs.recomputed(kind).kept
        return self._least(held, layer, size)

    def delayed(self, layer: int, kind: str, size: int = 0) -> float:
        """Return the least bytes that a microbatch keeps of a layer besides while its backward by
        weight waits."""
        costs = self.costs
        held = costs.held["delayed"] if kind == "none" else costs.recomputed(kind).delayed
        return self._least(held, layer, size)

    def transient(self, layer: int, kind: str, size: int = 0) -> float:
        """Return the least temporaries of a layer at the time of most, of its passes."""
        if (kind, size) not in self._transient:
            self._transient[kind, size] = self._most_temporaries(kind, size)
        return float(self._transient[kind, size][layer])

    def _least(self, held: HeldBytes, layer: int, size: int) -> float:
        by_node, rest = held.by_node(layer, size)
        return rest + sum(float(one.min()) for one in by_node.values())

    def _most_temporaries(self, kind: str, size: int) -> np.ndarray:
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

    def _alive(self, size: int) -> np.ndarray:
        """Return [layers] the least bytes of activations that are in memory, where both passes are
        one program, when most of them are."""
        if size not in self._kept:
            costs, memory = self.costs, self.costs.selection.memory
            spans = [
                (one.start, one.stop, one.count, least)
                for one, least in zip(memory.spans, memory.least(size).tolist(), strict=True)
                if one.kind == KINDS.index("activations")
            ]
            start, stop, count, least = np.array(spans, dtype=float).reshape(-1, 4).T
            alive = [float(least[(start <= t) & (t < stop)].sum()) for t in start]
            at = start[int(np.argmax(alive))] if alive else 0.0
            held = (start <= at) & (at < stop)
            made = np.searchsorted(np.array(costs.selection.times), start[held], side="right") - 1
            layers = costs.facts.layers[np.maximum(made, 0)]
            each = least[held] / count[held]
            self._kept[size] = np.bincount(layers, each, costs.num_layers)
        return self._kept[size]
