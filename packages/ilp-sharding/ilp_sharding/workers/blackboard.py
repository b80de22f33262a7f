"""What the worker processes of one solve share: the problem, and their best answers so far.

A directory of flat arrays, mapped into every process. Each array has one writer; a reader copies it
and checks that the writer's version did not change meanwhile, so nobody ever waits -> Board. No
object is pickled; arrays are read with `allow_pickle=False`.

    problem/*.npy   the base graph, complete once `ready` exists
    worker W        version, objective, bound, finished, x [base nodes]
    prices          version, price of memory [base strategies], written by worker 0
    active          version, which [base strategies] can still be in a better choice, by worker 0
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ilp_sharding.problem.flat_graph import Rows, TableGraph, Tables

_OBJECTIVE, _BOUND, _FINISHED, _HEADER = 0, 1, 2, 8
_MAPPED_BYTES = 2**20  # arrays above are mapped, so that all workers share one copy


class Board:
    """The shared arrays of `num_workers` workers on the base graph stored in `directory`.

    The parent makes them with `create` before it stores the graph.
    """

    def __init__(
        self,
        directory: Path,
        num_nodes: int,
        num_strategies: int,
        num_workers: int,
        *,
        create: bool = False,
    ) -> None:
        self.directory = directory
        self.num_workers = num_workers
        self._versions = _mapped(directory / "versions.bin", np.int64, num_workers + 2)
        self._heads = _mapped(directory / "heads.bin", np.float64, (num_workers, _HEADER))
        self._choices = _mapped(
            directory / "choices.bin", np.int64, (num_workers, max(num_nodes, 1))
        )
        self._prices = _mapped(directory / "prices.bin", np.float64, max(num_strategies, 1))
        self._active = _mapped(directory / "active.bin", np.uint8, max(num_strategies, 1))
        self._target = _mapped(directory / "target.bin", np.float64, 1)
        if create:
            self._heads[:, _BOUND] = -math.inf
            self._target[0] = math.inf
        self._num_nodes, self._num_strategies = num_nodes, num_strategies

    def offer(self, worker: int, objective: float, x: np.ndarray) -> None:
        """Publish the choice `x` [base nodes] of `worker`."""
        self._versions[worker] += 1
        self._heads[worker, _OBJECTIVE] = objective
        self._choices[worker, : self._num_nodes] = x
        self._versions[worker] += 1

    def raise_bound(self, worker: int, bound: float, finished: bool = False) -> None:
        """Publish a bound on the cost of every choice; `finished` says the search is over."""
        self._heads[worker, _BOUND] = max(bound, float(self._heads[worker, _BOUND]))
        if finished:
            self._heads[worker, _FINISHED] = 1.0

    def offers(self) -> list[tuple[float, int]]:
        """Return (objective, worker) of the workers that have a choice, best first."""
        return sorted(
            (float(self._heads[w, _OBJECTIVE]), w)
            for w in range(self.num_workers)
            if self._versions[w] > 0
        )

    def choice(self, worker: int) -> tuple[float, np.ndarray] | None:
        """Return (objective, x [base nodes]) of `worker`, None while it is being written."""
        before = int(self._versions[worker])
        objective = float(self._heads[worker, _OBJECTIVE])
        x = np.array(self._choices[worker, : self._num_nodes])
        if before % 2 or before == 0 or int(self._versions[worker]) != before:
            return None
        return objective, x

    @property
    def bound(self) -> float:
        """The best published bound, -inf if none."""
        return float(self._heads[:, _BOUND].max())

    def raise_target(self, objective: float) -> None:
        """Publish the cost of a choice that the parent knows."""
        self._target[0] = objective

    @property
    def best(self) -> float:
        """The cost of the best choice anybody knows, inf if none."""
        offers = self.offers()
        known = float(self._target[0])
        return min(offers[0][0], known) if offers else known

    @property
    def finished(self) -> bool:
        return bool((self._heads[:, _FINISHED] != 0.0).any())

    def publish_prices(self, prices: np.ndarray) -> None:
        """Publish memory prices [base strategies]."""
        self._publish(self.num_workers, self._prices, prices)

    def publish_active(self, active: np.ndarray) -> None:
        """Publish which [base strategies] are left."""
        self._publish(self.num_workers + 1, self._active, active)

    def prices(self, known: int) -> tuple[int, np.ndarray] | None:
        """Return (version, prices) if newer than version `known`."""
        return self._newer(self.num_workers, self._prices, known)

    def active(self, known: int) -> tuple[int, np.ndarray] | None:
        """Return (version, active) if newer than version `known`."""
        newer = self._newer(self.num_workers + 1, self._active, known)
        return None if newer is None else (newer[0], newer[1].astype(bool))

    def _publish(self, slot: int, target: np.ndarray, values: np.ndarray) -> None:
        self._versions[slot] += 1
        target[: self._num_strategies] = values
        self._versions[slot] += 1

    def _newer(self, slot: int, source: np.ndarray, known: int) -> tuple[int, np.ndarray] | None:
        version = int(self._versions[slot])
        if version <= known or version % 2:
            return None
        values = np.array(source[: self._num_strategies])
        return (version, values) if int(self._versions[slot]) == version else None


def store_graph(directory: Path, graph: TableGraph) -> None:
    """Write the base `graph` for the workers; the file `ready` appears last."""
    folder = directory / "problem"
    folder.mkdir()
    for name, array in [*graph.tables._asdict().items(), *graph.rows._asdict().items()]:
        kind = (
            "tables" if name in Tables._fields and array is getattr(graph.tables, name) else "rows"
        )
        np.save(folder / f"{kind}.{name}.npy", array)
    np.save(folder / "constant.npy", np.array(graph.constant))
    (directory / "ready").touch()


def load_graph(directory: Path) -> TableGraph:
    """Return the base graph that `store_graph` wrote; large arrays stay shared, copied on write."""

    def read(name: str) -> np.ndarray:
        path = directory / "problem" / f"{name}.npy"
        large = path.stat().st_size > _MAPPED_BYTES
        return np.asarray(np.load(path, mmap_mode="c" if large else None, allow_pickle=False))

    tables = Tables(*(read(f"tables.{name}") for name in Tables._fields))
    rows = Rows(*(read(f"rows.{name}") for name in Rows._fields))
    num_nodes = len(tables.offset) - 1
    sizes = np.diff(tables.offset)
    return TableGraph(
        tables=tables,
        rows=rows,
        constant=float(read("constant")),
        base_node=np.arange(num_nodes),
        label=np.arange(int(tables.offset[-1])) - np.repeat(tables.offset[:-1], sizes),
        settled=np.full(num_nodes, -1),
        base_time=np.arange(len(rows.slack)),
    )


def _mapped(path: Path, dtype: type, shape: int | tuple[int, ...]) -> np.ndarray:
    if not path.exists():
        count = int(np.prod(shape))
        with path.open("wb") as stream:
            stream.truncate(count * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)
