import itertools

import numpy as np

from ilp_sharding import SolveOptions
from ilp_sharding.choice.first_choice import greedy_start
from ilp_sharding.problem.instance import Instance


def test_entries_beyond_a_bound_are_those_no_cheap_choice_uses(random_problem):
    for seed in range(200):
        problem = random_problem(seed)
        instance = Instance.of(problem, SolveOptions())
        choices = [np.array(c) for c in itertools.product(*map(range, problem.num_strategies))]
        costs = [instance.objective(c) for c in choices]
        finite = sorted(c for c in costs if c < np.inf)
        if not finite:
            continue
        bound = finite[len(finite) // 2]
        fewer = instance.without(bound)
        for choice, cost in zip(choices, costs):
            if cost <= bound:
                assert fewer.objective(choice) == cost, seed


def test_the_bound_of_the_greedy_start_is_below_every_choice(random_problem):
    for seed in range(200):
        problem = random_problem(seed)
        instance = Instance.of(problem, SolveOptions())
        _, bound, _ = greedy_start(instance)
        for choice in itertools.product(*map(range, problem.num_strategies)):
            cost = instance.objective(np.array(choice))
            assert bound <= cost + 1e-9 * abs(cost), seed
