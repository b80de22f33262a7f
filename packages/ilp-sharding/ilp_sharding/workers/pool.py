"""The parent's side of the worker processes: start them, hand over the problem, collect answers.

Workers are plain subprocesses (`python -m ilp_sharding.workers.process`), so nothing depends on how
the caller's program was started, and the parent stays free to return at the deadline whatever the
workers are doing.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ilp_sharding.problem.flat_graph import table_graph
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network
from ilp_sharding.search import Search
from ilp_sharding.workers.blackboard import Board, store_graph

WORKER_SECONDS = 1.5  # that a worker process needs before it finds anything
_POLL_SECONDS = 0.01
_PARTING_SECONDS = 0.03
_FORKS = hasattr(os, "fork")


class WorkerPool:
    """Worker processes that wait for a problem; leaving its context ends them and removes what they
    share.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def started(self) -> bool:
        return bool(self.processes)

    def start(self, seconds: float) -> None:
        """Start the processes, if they are not, for a search of `seconds` from now."""
        if self.started:
            return
        shared = Path("/dev/shm")
        root = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="ilp-sharding-", dir=root))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        places = (Path(__file__).parent, Path("~").expanduser())
        if not any(os.access(place, os.W_OK) for place in places):
            # compiled loops are kept beside the package or at home; without either, for this solve
            environment.setdefault("NUMBA_CACHE_DIR", str(self.directory / "loops"))
        self._errors = (self.directory / "errors.txt").open("w+b")
        limit = seconds if math.isfinite(seconds) else 1e9
        groups = (
            [(0, self.count)] if _FORKS else [(index, index + 1) for index in range(self.count)]
        )
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "ilp_sharding.workers.process", str(self.directory)),
                    *(str(first), str(last), str(self.count), str(self.seed), repr(limit)),
                ],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # a signal to the caller's group must not come between
            )
            for first, last in groups
        ]

    def hand_over(self, network: Network, memory: MemoryProfile | None) -> None:
        """Let the workers search the reduced `network`."""
        base = table_graph(network, memory)
        sizes = base.num_nodes, base.num_strategies, self.count
        self._board = Board(self.directory, *sizes, create=True)
        store_graph(self.directory, base)

    def collect(self, network: Network, search: Search) -> None:
        """Take what the workers find in `network` into `search` until a proof or the deadline."""
        board, nodes = self._board, network.open_nodes()
        if search.choice is not None and math.isfinite(search.objective):
            board.raise_target(search.objective)
        known = math.inf
        while not search.late:
            for objective, worker in board.offers():
                if objective >= known:
                    break
                found = board.choice(worker)
                if found is not None:
                    known = found[0]
                    full = dict(zip(nodes, found[1].tolist(), strict=True))
                    search.offer(network.expand(full), "search")
                    break
            if board.finished:
                if search.choice is None and board.bound == math.inf:
                    search.infeasible = True
                elif board.best >= known:
                    search.raise_bound(search.objective, "proof")
                    return
            search.raise_bound(board.bound, "search")
            if search.closed or search.infeasible:
                return
            if all(process.poll() is not None for process in self.processes):
                if any(process.returncode for process in self.processes) and not board.finished:
                    raise RuntimeError(f"the search processes ended early: {self._complaints()}")
                if not board.finished or search.choice is None:
                    return  # they came to their deadline first, or found that there is no choice
            time.sleep(_POLL_SECONDS)

    def _close(self) -> None:
        if not self.started:
            return
        for process in self.processes:
            if _FORKS and process.stdin is not None:
                process.stdin.close()  # the end of their input ends the forks
            else:
                process.kill()
        for process in self.processes:
            try:
                process.wait(_PARTING_SECONDS)
            except subprocess.TimeoutExpired:  # it is still loading, or letting go of much memory
                if _FORKS:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._errors.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _complaints(self) -> str:
        self._errors.flush()
        text = (self.directory / "errors.txt").read_text(errors="replace").strip()
        return text[-2000:] or "no message"
