import numpy as np
from attrs import evolve

from ilp_sharding import SolveOptions, check
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import MemoryProfile, peak_times, violated_peaks
from ilp_sharding.problem.reduction import Network


def test_peak_times_see_the_largest_live_sets_only():
    # [0, 4), [1, 2), [3, 5): live sets {a}, {a, b}, {a}, {a, c}, {c}
    assert peak_times(np.array([0, 1, 3]), np.array([4, 2, 5])).tolist() == [1, 3]


def test_usage_of_open_choices_is_what_the_checker_measures(random_problem):
    rng = np.random.default_rng(0)
    for seed in range(300):
        problem = random_problem(seed)
        network = Network(Instance.of(problem, SolveOptions()))
        try:
            network.reduce()
        except NoAssignment:
            continue
        limited = evolve(Instance.of(problem, SolveOptions()), limit=1000.0)
        memory = MemoryProfile(limited, network)
        positions = np.array([rng.integers(len(network.cost[i])) for i in memory.nodes], int)
        full = network.expand(dict(zip(memory.nodes, positions.tolist())))
        used = memory.usage(memory.indicator(positions)) + (1000.0 - memory.slack)
        peak = check(problem, full.tolist()).peak_memory
        assert abs(used.max(initial=0.0) - peak) < 1e-9, seed
        for t in range(memory.num_times):
            by_row = memory.row(t) @ memory.indicator(positions) + 1000.0 - memory.slack[t]
            assert abs(by_row - used[t]) < 1e-9, seed


def test_violated_peaks_are_one_per_run_worst_first():
    excess = np.array([0.0, 1.0, 3.0, 2.0, 0.0, 5.0, -1.0])
    assert violated_peaks(excess, 10) == [5, 2]
