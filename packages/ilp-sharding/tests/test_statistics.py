from ilp_sharding import problem_statistics


def test_reduction_never_grows_a_problem(random_problem):
    for seed in range(60):
        numbers = problem_statistics(random_problem(seed))
        for before, after in (numbers.nodes, numbers.strategies):
            assert after <= before, seed
        assert len(numbers.rows()) >= 9


def test_forbidden_problems_are_called_infeasible(random_problem, brute_force):
    for seed in range(60):
        problem = random_problem(seed, limit=False)
        best = brute_force(problem)[0]
        allowed = best is not None and best < 10**17  # 10^18 is the mark of a forbidden pair
        assert problem_statistics(problem).feasible >= allowed, seed
