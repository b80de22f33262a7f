"""What there is to choose from: an operator's strategies, changes of sharding, and the problem.

`enumerate_strategies` finds the strategies of an operator from its sharding rule, `Conversions` the
cheapest collectives between two sharding specs of a tensor, `ProblemBuilder` adds up costs to a
`ShardingProblem`. Nothing in here solves, and the solver imports nothing of it.
"""

from ilp_sharding.strategies.conversions import (
    FREE,
    Conversions,
    ConversionTable,
    nominal_bytes,
    sharding_specs,
)
from ilp_sharding.strategies.divisibility import Divisibility, divisibility_of
from ilp_sharding.strategies.enumeration import (
    StrategyOptions,
    completed_specs,
    enumerate_strategies,
    natural_strategies,
    shardable_factors,
)
from ilp_sharding.strategies.problem_builder import ProblemBuilder

__all__ = [
    "FREE",
    "ConversionTable",
    "Conversions",
    "Divisibility",
    "ProblemBuilder",
    "StrategyOptions",
    "completed_specs",
    "divisibility_of",
    "enumerate_strategies",
    "natural_strategies",
    "nominal_bytes",
    "shardable_factors",
    "sharding_specs",
]
