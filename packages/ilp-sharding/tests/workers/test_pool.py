import subprocess
import sys
import time
from pathlib import Path

import attrs
import numpy as np
import pytest

from ilp_sharding import SolveOptions, check, solve, write_problem

_FOREVER = """
import sys
from ilp_sharding import SolveOptions, read_problem, solve

solve(read_problem(sys.argv[1]), SolveOptions())
"""


@pytest.mark.slow
def test_worker_processes_improve_on_the_start_and_never_overstate_the_bound(wide_problem):
    problem = wide_problem(3, limit=1200.0)
    start = solve(problem, SolveOptions(deadline=0.02))
    found = solve(problem, SolveOptions(deadline=6.0))
    assert found.choice is not None and check(problem, found.choice).feasible
    assert found.seconds < 60.0  # a busy machine is late
    assert found.lower_bound is not None and found.objective is not None
    assert found.lower_bound <= found.objective
    if start.objective is not None:
        assert found.objective <= start.objective


@pytest.mark.slow
def test_worker_processes_agree_with_a_planted_optimum(wide_problem):
    problem = wide_problem(4, nodes=60, size=12)
    rng = np.random.default_rng(0)
    planted = rng.integers(0, 12, problem.num_nodes)
    cost = problem.node_cost + 1
    cost[np.arange(problem.num_nodes) * 12 + planted] = 0
    tables = problem.edge_cost.reshape(-1, 12, 12) + 1
    pairs = problem.edges
    tables[np.arange(len(pairs)), planted[pairs[:, 0]], planted[pairs[:, 1]]] = 0
    easy = attrs.evolve(problem, node_cost=cost, edge_cost=tables.ravel())
    solution = solve(easy, SolveOptions(deadline=60.0))
    assert solution.status == "optimal" and solution.objective == 0.0
    assert solution.choice == tuple(planted.tolist())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_worker_processes_end_with_a_killed_caller(wide_problem, tmp_path):
    file = tmp_path / "wide.json"
    write_problem(wide_problem(0, nodes=150, limit=2500.0), file)
    caller = subprocess.Popen([sys.executable, "-c", _FOREVER, str(file)])
    try:
        workers = _until(lambda: _descendants(caller.pid)[2:])  # after the process that forks them
        folder = Path(_command(workers[0])[3])
        assert folder.is_dir()
    finally:
        caller.kill()
        caller.wait()
    _until(lambda: not any(_command(worker) for worker in workers))
    _until(lambda: not folder.exists())


def _until(true, seconds=120.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = true()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not so within {seconds} s")


def _descendants(pid):
    """Return the processes below `pid`, parents first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found = [pid]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found[1:]


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
