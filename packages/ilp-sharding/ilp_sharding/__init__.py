"""Choose one sharding strategy per operator at least total cost under a memory limit, with a proof.

`solve` takes an `alpa_interchange` `ShardingProblem` and returns a `ShardingSolution`: the choice,
its cost, a proven lower bound and a status. `check` judges any choice independently of the solver.
"""

from ilp_sharding.compiled_loops import warm_up
from ilp_sharding.contest_file import ContestFileError, read_problem, write_problem
from ilp_sharding.evaluation import Evaluation, check
from ilp_sharding.options import Progress, SolveOptions
from ilp_sharding.solver import pin_cost, solve
from ilp_sharding.statistics import Statistics, problem_statistics

__all__ = [
    "ContestFileError",
    "Evaluation",
    "Progress",
    "SolveOptions",
    "Statistics",
    "check",
    "pin_cost",
    "problem_statistics",
    "read_problem",
    "solve",
    "warm_up",
    "write_problem",
]
