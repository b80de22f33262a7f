import os
import subprocess
import sys

import pytest

from ilp_sharding import warm_up
from ilp_sharding.compiled_loops import HALVES, load, ready

GROUPS = (
    "exact.elimination_loops",
    "problem.graph_loops",
    "bound.messages",
    "bound.pruned_sweeps",
    "bound.dominance",
    "choice.forest_moves",
    "choice.ball_minimisation",
)

# A process of its own, since loops once loaded stay loaded. The problem is too wide to eliminate.
WITHOUT_A_CACHE = """
import sys
import time
import numpy as np
from alpa_interchange.selection import ShardingProblem
from ilp_sharding import SolveOptions, check, solve

time.perf_counter = time.process_time  # deadlines in CPU seconds, however busy the machine is
random = np.random.default_rng(0)
pairs = np.array([(i, j) for i in range(60) for j in range(i) if random.random() < 0.15])
problem = ShardingProblem(
    num_strategies=np.full(60, 12),
    node_cost=random.integers(0, 1000, 720),
    node_memory=random.integers(1, 100, 720),
    live=np.tile([0, 10], (60, 1)),
    edges=pairs,
    edge_cost=random.integers(0, 1000, len(pairs) * 144),
    memory_limit=2500.0,
)
solution = solve(problem, SolveOptions(deadline=1.2))
trivial = solve(problem, SolveOptions(deadline=0.0))
assert check(problem, solution.choice).feasible
assert trivial.lower_bound < solution.lower_bound <= solution.objective
assert "numba" not in sys.modules, "nothing may be compiled under a short deadline"
"""


def test_a_short_deadline_without_a_cache_compiles_nothing_and_still_bounds(tmp_path):
    subprocess.run(
        [sys.executable, "-c", WITHOUT_A_CACHE],
        env={
            **os.environ,
            "NUMBA_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        check=True,
        timeout=300,
    )
    assert not list(tmp_path.rglob("*.nbi"))


@pytest.mark.slow
def test_warm_up_loads_every_group_and_says_so():
    heard = []
    warm_up(lambda name, share: heard.append((name, share)))
    assert [name for name, _ in heard] == [*GROUPS, "done"]
    shares = [share for _, share in heard]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert ready(0.0, *GROUPS)


def test_loaded_loops_are_ready_at_any_time():
    load("bound.messages")
    assert ready(0.0, "bound.messages")
    load("bound.messages")  # at once


def test_the_halves_that_two_processes_compile_are_all_there_is():
    assert sorted(sum(HALVES, ())) == sorted(GROUPS)
