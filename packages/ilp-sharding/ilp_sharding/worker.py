"""A worker process of the search: `python -m ilp_sharding.worker DIRECTORY INDEX COUNT SEED
SECONDS`.

Worker 0 raises the bound: multipliers and messages, fixing of strategies by reduced cost, branching
or the integer program once the problem is small. The other workers look for better choices with the
multipliers of worker 0. Both publish on the `Board`; the parent reads it and ends the workers.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import numpy as np

from ilp_sharding.blackboard import Board, load_graph
from ilp_sharding.dominance import simplified
from ilp_sharding.table_graph import TableGraph

_DOMINANCE_WORK = 1e7  # elementary steps of dominance per second that is left: a twentieth of it


class Worker:
    """The state both kinds of worker share: base graph, present graph, board, deadline."""

    def __init__(self, directory: Path, index: int, count: int, seed: int, until: float) -> None:
        self.index, self.seed, self.until = index, seed + 7919 * index, until
        base = load_graph(directory)
        self.base = base
        self.board = Board(directory, base.num_nodes, base.num_strategies, count)
        self.integral = bool(
            np.array_equal(base.tables.cost, np.rint(base.tables.cost))
            and _whole(base.tables.entry)
            and float(base.constant).is_integer()
        )
        # dominance takes seconds on the largest graphs: worker 0 does it, for a twentieth of the
        # time, and publishes what is left
        seconds = max(until - time.perf_counter(), 0.0)
        work = min(_DOMINANCE_WORK * seconds, 2e9)
        graph = simplified(base, dominate=index == 0, work=work)
        if graph is None:
            self.board.raise_bound(index, math.inf, finished=True)
            raise SystemExit(0)
        self.graph = graph
        if index == 0:
            self.publish_active(graph)

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.until

    def slice(self, seconds: float) -> float:
        """Return the end of a time slice from now."""
        return min(time.perf_counter() + seconds, self.until)

    def offer(self, graph: TableGraph, x: np.ndarray, cost: float) -> None:
        """Publish the choice `x` of `graph` if it beats all published ones."""
        if cost < self.board.best:
            self.board.offer(self.index, cost, graph.lift(x))

    def best_choice(self) -> tuple[float, np.ndarray] | None:
        """Return (cost, x [base nodes]) of the best published choice."""
        for _, worker in self.board.offers():
            found = self.board.choice(worker)
            if found is not None:
                return found
        return None

    def cutoff(self) -> float:
        """Return the cost from which on a choice is no improvement."""
        best = self.board.best
        return best - 1 + 1e-6 if self.integral else best - 1e-10 * abs(best)

    def base_strategies(self, graph: TableGraph) -> np.ndarray:
        """Return the base strategy of every strategy of `graph`."""
        owner = np.repeat(graph.base_node, np.diff(graph.tables.offset))
        return np.asarray(self.base.tables.offset[owner] + graph.label)

    def publish_active(self, graph: TableGraph) -> None:
        """Publish `graph` as what is left."""
        active = np.zeros(self.base.num_strategies, bool)
        active[self.base_strategies(graph)] = True
        self.board.publish_active(active)

    def raise_bound(self, bound: float) -> None:
        """Publish `bound`, rounded up for integer costs."""
        if self.integral and math.isfinite(bound):
            bound = math.ceil(bound - 1e-6 * max(1.0, abs(bound) * 1e-6))
        self.board.raise_bound(self.index, bound)


def _whole(entries: np.ndarray) -> bool:
    finite = entries[entries < np.inf]
    return bool(np.array_equal(finite, np.rint(finite)) and np.abs(finite).sum() < 2.0**52)


def main(arguments: list[str]) -> int:
    """Run one worker; return the exit status."""
    directory, index, count, seed, seconds = arguments
    started = time.perf_counter()
    parent = os.getppid()
    folder = Path(directory)
    # compiled loops load while the parent still reduces the problem
    from ilp_sharding.bound_search import search_bounds
    from ilp_sharding.choice_search import search_choices

    while not (folder / "ready").exists():
        if os.getppid() != parent or not folder.exists():
            return 1
        time.sleep(0.005)
    worker = Worker(folder, int(index), int(count), int(seed), started + float(seconds))
    if worker.index == 0:
        search_bounds(worker)
    else:
        search_choices(worker)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
