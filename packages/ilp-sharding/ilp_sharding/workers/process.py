"""The worker processes of the search.

`python -m ilp_sharding.workers.process DIRECTORY FIRST LAST COUNT SEED SECONDS` runs workers FIRST
to LAST - 1 of COUNT.

Several are forked from one process once numba is loaded, as that takes longer than many a problem.
They end when that process reads the end of its standard input -> _fork().

Worker 0 raises the bound: multipliers and messages, fixing of strategies by reduced cost, branching
or the integer program once the problem is small. The other workers look for better choices with the
multipliers of worker 0. Both publish on the `Board`; the parent reads it and ends the workers.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

from ilp_sharding.bound.dominance import simplified, without_dominated
from ilp_sharding.compiled_loops import load, uncompiled
from ilp_sharding.problem.flat_graph import TableGraph
from ilp_sharding.workers.blackboard import Board, load_graph

Job = TypeVar("Job")

_POLL_SECONDS = 0.005
_LOOPS = (  # to compile at the same time
    ("bound.messages", "bound.dominance"),
    ("choice.forest_moves", "choice.ball_minimisation"),
)
_DOMINANCE_SHARE = 0.05  # of the time


class Worker:
    """The state both kinds of worker share: base graph, present graph, board, deadline."""

    def __init__(
        self,
        board: Board,
        index: int,
        seed: int,
        until: float,
        base: TableGraph,
        graph: TableGraph,
    ) -> None:
        self.board, self.base = board, base
        self.index, self.seed, self.until = index, seed + 7919 * index, until
        self.integral = bool(
            np.array_equal(base.tables.cost, np.rint(base.tables.cost))
            and _whole(base.tables.entry)
            and float(base.constant).is_integer()
        )
        self.graph = graph

    def leave_out_dominated(self) -> bool:
        """Reduce and publish the graph for a share of the time; return whether a choice is left.

        This takes seconds on the largest graphs, so worker 0 does it for all.
        """
        smaller = without_dominated(self.graph, self.slice(_DOMINANCE_SHARE * self.seconds))
        if smaller is None:
            self.board.raise_bound(self.index, math.inf, finished=True)
            return False
        self.graph = smaller
        self.publish_active(smaller)
        return True

    @property
    def seconds(self) -> float:
        """The time left."""
        return max(self.until - time.perf_counter(), 0.0)

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
    """Run workers; return the exit status. What they share goes when the parent did."""
    directory, first, last, count, seed, seconds = arguments
    until = time.perf_counter() + float(seconds)
    try:
        return _serve(Path(directory), range(int(first), int(last)), int(count), int(seed), until)
    finally:
        if _parent_left():
            shutil.rmtree(directory, ignore_errors=True)


def _serve(folder: Path, indices: range, count: int, seed: int, until: float) -> int:
    """Run the workers `indices` of `count` once the problem is there; return the exit status."""
    # numba loads while the parent still reduces the problem: the import, and a first compiled loop
    from ilp_sharding.choice.ball_minimisation import seed_random
    from ilp_sharding.workers.bound_worker import search_bounds
    from ilp_sharding.workers.choice_worker import search_choices

    seed_random(0)
    if hasattr(os, "fork"):
        if uncompiled():
            _fork(_LOOPS, lambda names: load(*names))
        load(*chain(*_LOOPS))
    while not (folder / "ready").exists():
        if _parent_left() or not folder.exists():
            return 1
        time.sleep(_POLL_SECONDS)
    base = load_graph(folder)
    board = Board(folder, base.num_nodes, base.num_strategies, count)
    graph = simplified(base)
    if graph is None:
        board.raise_bound(0, math.inf, finished=True)
        return 0

    def run(index: int) -> None:
        worker = Worker(board, index, seed, until, base, graph)
        if index:
            search_choices(worker)
        elif worker.leave_out_dominated():
            search_bounds(worker)

    if hasattr(os, "fork"):
        return _fork(indices, run)
    for index in indices:
        run(index)
    return 0


def _parent_left() -> bool:
    """Return whether standard input ended: the parent is gone, or wants no more."""
    return hasattr(os, "fork") and bool(select.select([sys.stdin], [], [], 0.0)[0])


def _fork(jobs: Iterable[Job], run: Callable[[Job], None]) -> int:
    """Run every job in a fork of this process; return the worst exit status.

    They are killed once standard input ends.
    """
    children = []
    for job in jobs:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run(job)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    worst = 0
    while children:
        if _parent_left():
            for child in children:
                os.kill(child, signal.SIGKILL)
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                children.remove(child)
                worst = max(worst, abs(os.waitstatus_to_exitcode(status)))
        time.sleep(_POLL_SECONDS)
    return worst


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # numba takes a while to leave otherwise
