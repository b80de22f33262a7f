"""Changes of one node at a time under hard memory rows: repair a violation, then descend.

Repair takes the change with the least cost per unit of violation removed until nothing is violated;
descent takes any change that lowers the cost and keeps every row -> LocalMoves. Dense: meant for
problems whose rows [times, strategies] fit in memory a few times over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ilp_sharding.problem.reduction import Network


class LocalMoves:
    """One-node changes over the open `nodes` of `network`, with `usage` [times, strategies] and
    `slack`.
    """

    def __init__(
        self, network: Network, nodes: Sequence[int], usage: np.ndarray, slack: np.ndarray
    ) -> None:
        self.network, self.nodes, self.usage, self.slack = network, list(nodes), usage, slack
        sizes = [len(network.cost[i]) for i in self.nodes]
        self.offset = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.owner = np.repeat(np.arange(len(self.nodes)), sizes)
        self.position = {node: p for p, node in enumerate(self.nodes)}

    def cost(self, chosen: np.ndarray) -> float:
        """Return the cost of the open nodes and the tables between them."""
        total = 0.0
        for p, node in enumerate(self.nodes):
            total += float(self.network.cost[node][chosen[p]])
            for other, table in self.network.tables[node].items():
                if node < other:
                    total += float(table[chosen[p], chosen[self.position[other]]])
        return total

    def fits(self, chosen: np.ndarray) -> bool:
        """Return whether `chosen` keeps every memory row."""
        return bool((self.usage[:, self.offset[:-1] + chosen].sum(1) <= self.slack).all())

    def improve(self, chosen: np.ndarray, max_steps: int = 200) -> np.ndarray | None:
        """Return a choice that keeps all rows, near `chosen` and no single change from a cheaper
        one.

        None if repair got stuck.
        """
        chosen = chosen.copy()
        conditional = self._conditional(chosen)
        used = self.usage[:, self.offset[:-1] + chosen].sum(1)
        for _ in range(max_steps):
            current = self.offset[:-1] + chosen
            increase = conditional - conditional[current][self.owner]
            excess = used - self.slack
            over = excess > 0
            if over.any():
                change = self.usage[over] - self.usage[over][:, current][:, self.owner]
                after = np.maximum(excess[over][:, None] + change, 0.0).sum(0)
                removed = excess[over].sum() - after
                with np.errstate(invalid="ignore", divide="ignore"):
                    score = np.where(removed > 0, np.maximum(increase, 0.0) / removed, np.inf)
                best = int(np.argmin(score))
                if not score[best] < np.inf:
                    return None
            else:
                order = np.flatnonzero(increase < 0)
                order = order[np.argsort(increase[order], kind="stable")]
                best = -1
                for v in order.tolist():
                    change = self.usage[:, v] - self.usage[:, current[self.owner[v]]]
                    if (used + change <= self.slack).all():
                        best = v
                        break
                if best < 0:
                    return chosen
            p = int(self.owner[best])
            used = used + self.usage[:, best] - self.usage[:, current[p]]
            self._move(chosen, conditional, p, best - int(self.offset[p]))
        return chosen if (used <= self.slack).all() else None

    def _conditional(self, chosen: np.ndarray) -> np.ndarray:
        parts = []
        for node in self.nodes:
            total = self.network.cost[node]
            for other, table in self.network.tables[node].items():
                total = total + table[:, chosen[self.position[other]]]
            parts.append(total)
        return np.concatenate(parts) if parts else np.zeros(0)

    def _move(self, chosen: np.ndarray, conditional: np.ndarray, p: int, strategy: int) -> None:
        node = self.nodes[p]
        chosen[p] = strategy
        for other in self.network.tables[node]:
            q = self.position[other]
            total = self.network.cost[other]
            for third, table in self.network.tables[other].items():
                total = total + table[:, chosen[self.position[third]]]
            conditional[self.offset[q] : self.offset[q + 1]] = total
