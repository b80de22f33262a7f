import time

import attrs
import numpy as np
import pytest

from alpa_interchange.selection import ShardingProblem
from ilp_sharding import Progress, SolveOptions, check, pin_cost, solve
from ilp_sharding.choice.first_choice import consistent_start, greedy_start
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network


def _problem(node_cost, edge_cost=(), edges=(), memory=None, live=None, limit=None, count=None):
    count = count or [len(c) for c in node_cost]
    flat = [c for costs in node_cost for c in costs]
    return ShardingProblem(
        num_strategies=count,
        node_cost=np.array(flat),
        node_memory=np.zeros(len(flat)) if memory is None else np.array(memory),
        live=np.tile([0, 1], (len(count), 1)) if live is None else np.array(live),
        edges=np.array(edges, dtype=int).reshape(-1, 2),
        edge_cost=np.array([c for table in edge_cost for c in table]),
        memory_limit=limit,
    )


@pytest.mark.sample(block=4)
@pytest.mark.parametrize("block", range(20))
def test_answers_of_random_problems_are_the_brute_force_optimum(random_problem, brute_force, block):
    for seed in range(100 * block, 100 * (block + 1)):
        problem = random_problem(seed)
        best, least_memory = brute_force(problem)
        solution = solve(problem)
        if best is None:
            assert solution.status == "infeasible", seed
            if least_memory is None:
                assert solution.smallest_memory is None, seed
            else:
                assert solution.smallest_memory == pytest.approx(least_memory, rel=1e-9), seed
            continue
        assert solution.status == "optimal", seed
        assert solution.objective == pytest.approx(best, rel=1e-12, abs=1e-15), seed
        assert solution.choice is not None and solution.lower_bound is not None, seed
        assert solution.lower_bound <= best + 1e-12 * abs(best), seed
        judged = check(problem, solution.choice)
        assert judged.feasible and judged.cost == pytest.approx(best, rel=1e-12, abs=1e-15), seed


def test_the_edge_decides_against_the_cheapest_nodes():
    # cheapest nodes: 0 + 0, but their pair costs 10; the pair (0, 1) costs 1 + 2 = 3
    problem = _problem([[0, 5], [0, 2]], [[10, 1, 0, 0]], [(0, 1)])
    assert solve(problem).choice == (0, 1)
    assert solve(problem).objective == 3.0


def test_memory_holds_only_while_a_node_lives():
    # node 0 lives at [0, 1), node 1 at [1, 2): both may use 5 of 5; overlapping they may not
    apart = _problem([[0, 9], [0, 9]], memory=[5, 0, 5, 0], live=[[0, 1], [1, 2]], limit=5)
    together = attrs.evolve(apart, live=np.array([[0, 2], [1, 2]]))
    assert solve(apart).objective == 0.0
    assert solve(together).objective == 9.0


def test_empty_intervals_use_no_memory():
    problem = _problem([[0, 1]], memory=[100, 0], live=[[3, 3]], limit=1)
    assert solve(problem).choice == (0,)


def test_a_problem_without_nodes_costs_nothing():
    solution = solve(_problem([]))
    assert solution.choice == () and solution.objective == 0.0 and solution.status == "optimal"


def test_infeasible_memory_is_proved_with_the_smallest_feasible_limit():
    problem = _problem([[0, 1], [0, 1]], memory=[8, 3, 7, 4], limit=6)
    solution = solve(problem)
    assert solution.status == "infeasible" and solution.choice is None
    assert solution.smallest_memory == 7.0  # 3 + 4
    assert solve(attrs.evolve(problem, memory_limit=7.0)).objective == 2.0


def test_forbidden_pairs_that_leave_nothing_are_infeasible():
    problem = _problem([[0.0], [0.0]], [[np.inf]], [(0, 1)])
    solution = solve(problem)
    assert solution.status == "infeasible" and solution.smallest_memory is None


def test_integer_sums_beyond_64_bits_do_not_overflow():
    huge = 9 * 10**18
    problem = _problem([[huge], [huge], [huge]])
    solution = solve(problem)
    assert solution.objective == float(3 * huge) and solution.status == "optimal"


def test_huge_costs_are_taken_when_nothing_else_is_left():
    problem = _problem([[10**18, 10**18 + 4096]])
    assert solve(problem).choice == (0,)


def test_huge_costs_lose_against_a_larger_sum_only_if_they_are_larger():
    big = 6 * 10**17
    problem = _problem([[big, 10**18], [big, 0]], [[0, 10**18, 0, 0]], [(0, 1)])
    # (0, 0) costs 1.2e18, (1, 1) costs 1e18: the "forbidden" entry is the better one
    assert solve(problem).choice == (1, 1)


def test_pins_and_forbidden_strategies_hold():
    problem = _problem([[0, 3, 5], [0, 1]], [[0, 9, 9, 0, 9, 0]], [(0, 1)])
    assert solve(problem).choice == (0, 0)
    assert solve(problem, SolveOptions(pins={1: 1})).choice == (1, 1)
    assert solve(problem, SolveOptions(forbid={(0, 0), (0, 1)})).choice == (2, 1)


def test_pin_cost_is_the_difference_of_the_two_optima():
    problem = _problem([[0, 3], [0, 1]], [[0, 9, 9, 0]], [(0, 1)])
    assert pin_cost(problem, {1: 1}) == (4.0, 4.0)
    assert pin_cost(problem, {1: 0}) == (0.0, 0.0)
    assert pin_cost(attrs.evolve(problem, node_cost=[0, np.inf, 0, 1]), {0: 1}) == (np.inf, np.inf)


def test_unknown_nodes_and_strategies_are_refused_by_name():
    problem = _problem([[0, 1]])
    with pytest.raises(ValueError, match="node 3"):
        solve(problem, SolveOptions(pins={3: 0}))
    with pytest.raises(ValueError, match="strategy 2"):
        solve(problem, SolveOptions(forbid={(0, 2)}))


def test_options_are_checked():
    for wrong in ({"deadline": -1.0}, {"num_workers": 0}, {"gap_tolerance": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SolveOptions(**wrong)


def test_a_warm_start_is_kept_when_time_is_too_short_to_improve_it(wide_problem):
    problem = wide_problem(1)
    good = solve(problem, SolveOptions(deadline=0.5))
    again = solve(problem, SolveOptions(deadline=0.05, warm_start=good.choice))
    assert good.objective is not None and again.objective is not None
    assert again.objective <= good.objective


@pytest.mark.parametrize("stale", [(), (9, 9, 9), (0, 1, 1, 0, 0, 7)])
def test_a_stale_warm_start_does_no_harm(random_problem, brute_force, stale):
    for seed in range(40):
        problem = random_problem(seed)
        solution = solve(problem, SolveOptions(warm_start=stale))
        best = brute_force(problem)[0]
        if best is None:
            assert solution.status == "infeasible"
        else:
            assert solution.objective == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("deadline", [0.0, 0.001, 0.01, 0.1])
def test_short_deadlines_give_valid_answers(wide_problem, deadline):
    problem = wide_problem(2, limit=2500.0)
    solution = solve(problem, SolveOptions(deadline=deadline))
    assert solution.status in ("optimal", "feasible", "timed_out")
    if solution.choice is not None:
        assert check(problem, solution.choice).feasible
        assert solution.lower_bound is not None and solution.objective is not None
        assert solution.lower_bound <= solution.objective


@pytest.mark.sample(deadline=3)
@pytest.mark.parametrize("deadline", [0.01, 0.03, 0.1, 0.3])
def test_short_deadlines_hold_and_bring_a_bound(wide_problem, monkeypatch, deadline):
    # the solver's clock counts CPU seconds here, so that other work on the machine does not matter
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    monkeypatch.setattr("ilp_sharding.solver.WorkerPool.start", None)  # too late for processes
    problems = [wide_problem(2, limit=2500.0), wide_problem(3), _follow_me(200, 32, 1)]
    problems.append(attrs.evolve(problems[2], node_memory=np.ones(200 * 32), memory_limit=1.0))
    for problem in problems:
        seconds = []
        for _ in range(3):  # the first loads modules; a processor has slow moments
            began = time.perf_counter()
            solution = solve(problem, SolveOptions(deadline=deadline))
            seconds.append(time.perf_counter() - began)
        # how well deadlines are kept is measured by benchmarks/ilp_sharding_deadlines.py
        assert min(seconds) < 1.5 * deadline + 0.01
        assert solution.lower_bound is not None or solution.status == "infeasible"
        if deadline >= 0.1:
            assert solution.choice is not None or solution.status == "infeasible"


@pytest.mark.parametrize("limit", [None, 1200.0])
def test_an_answer_at_a_deadline_is_as_good_as_the_greedy_start(wide_problem, limit, monkeypatch):
    # CPU seconds, as above: a busy machine gave a whole deadline away to other programs
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    monkeypatch.setattr("ilp_sharding.solver.WorkerPool.start", None)
    for seed in range(3):
        problem = wide_problem(seed, limit=limit)
        start, *_ = greedy_start(Instance.of(problem, SolveOptions()))
        solution = solve(problem, SolveOptions(deadline=0.2))
        if start is not None and solution.seconds < 0.4:  # the machine was not away meanwhile
            assert solution.objective is not None
            assert solution.objective <= check(problem, start.tolist()).cost


def test_a_limit_that_nothing_keeps_is_proved_without_worker_processes(wide_problem, monkeypatch):
    monkeypatch.setattr("ilp_sharding.solver.WorkerPool.start", None)
    problem = wide_problem(5)
    least = int(problem.node_memory.reshape(60, 12).min(1).sum())
    solution = solve(attrs.evolve(problem, memory_limit=least - 1))
    assert solution.status == "infeasible" and solution.smallest_memory == least


def _follow_me(nodes, size, seed):
    """A chain whose strategies mostly follow each other one to one, with residual edges."""
    rng = np.random.default_rng(seed)
    edges, tables = [], []
    for i in range(1, nodes):
        for source in [i - 1] + ([i - 7] if i % 7 == 0 else []):
            table = rng.random((size, size))
            table[(rng.random((size, size)) < 0.25) & ~np.eye(size, dtype=bool)] = np.inf
            if rng.random() < 0.6 and source == i - 1:
                table = np.where(np.eye(size, dtype=bool), 0.0, np.inf)
            edges.append((source, i))
            tables.append(table.ravel())
    costs = rng.random((nodes, size)).tolist()
    return _problem(costs, tables, edges)


def _consistent(problem):
    """Return the choice of `consistent_start` on the reduced network, None if it finds none."""
    instance = Instance.of(problem, SolveOptions())
    network = Network(instance)
    try:
        network.reduce()
    except NoAssignment:
        return None
    memory = MemoryProfile(instance, network) if np.isfinite(instance.limit) else None
    chosen = consistent_start(network, memory)
    return None if chosen is None else network.expand(chosen).tolist()


@pytest.mark.parametrize("limit", [None, 1e9])
def test_forbidden_pairs_do_not_keep_the_first_pass_from_a_choice(limit):
    # a greedy pass that looks only at its neighbours ends in a forbidden pair of such problems
    for seed in range(3):
        problem = attrs.evolve(_follow_me(200, 64, seed), memory_limit=limit)
        start, *_ = greedy_start(Instance.of(problem, SolveOptions()))
        for choice in (_consistent(problem), start):
            assert choice is not None and check(problem, list(choice)).feasible


def test_first_choices_of_random_problems_are_feasible(random_problem, brute_force):
    found = 0
    for seed in range(300):
        problem = random_problem(seed)
        choice = _consistent(problem)
        if choice is not None:
            found += 1
            assert check(problem, choice).feasible, seed
            assert brute_force(problem)[0] is not None, seed
    assert found > 150


def test_greedy_starts_are_feasible_and_their_bounds_and_refusals_true(random_problem, brute_force):
    found = refused = 0
    for seed in range(400):
        problem = random_problem(seed, nodes=6)
        if seed % 2 and problem.memory_limit is not None:
            problem = attrs.evolve(problem, memory_limit=0.6 * problem.memory_limit)
        best, _ = brute_force(problem)
        choice, bound, impossible = greedy_start(Instance.of(problem, SolveOptions()))
        if choice is not None:
            found += 1
            assert check(problem, choice.tolist()).feasible, seed
        if best is not None and best < 1e17:
            assert bound <= best + 1e-9 * abs(best) and not impossible, seed
        refused += impossible
    assert found > 100 and refused > 20


def test_small_problems_give_the_same_choice_every_time(random_problem):
    for seed in range(30):
        problem = random_problem(seed)
        assert solve(problem).choice == solve(problem).choice


def test_progress_reports_rising_bounds_and_falling_costs(random_problem):
    reports: list[Progress] = []
    solve(random_problem(10, nodes=6), SolveOptions(progress=reports.append))
    bounds = [report.lower_bound for report in reports]
    costs = [report.objective for report in reports if report.objective is not None]
    assert reports and bounds == sorted(bounds) and costs == sorted(costs, reverse=True)
