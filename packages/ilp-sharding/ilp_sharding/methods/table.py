"""The methods that a reduced problem is given to, one after the other, as values.

Each says how long it would take, and is tried if that is less than the time left; what it finds and
proves goes into the search, from which the next one goes on -> apply_methods(). The order is that
of the CPU seconds they take on a problem that all of them solve: elimination and small integer
programs at once, sweeps over the tables for wide graphs, rounds of a search, worker processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attrs import frozen

from ilp_sharding.choice.first_choice import consistent_start
from ilp_sharding.methods.direct import direct_seconds, elimination_in_time, solve_direct
from ilp_sharding.methods.narrowing import narrowing_seconds, solve_narrowed
from ilp_sharding.methods.numpy_sweeps import sweep, sweeps_seconds
from ilp_sharding.methods.reduced import Reduced
from ilp_sharding.methods.rounds import (
    counted_seconds,
    search_briefly,
    search_counted,
    short_seconds,
)
from ilp_sharding.workers.pool import WORKER_SECONDS

QUICK_WORK = 1e6  # table entries of an elimination that is as quick as a first choice


@frozen
class Method:
    """One way to go on with a reduced problem.

    `seconds` predicts how long it takes, inf for a problem that is not for it; `run` returns
    whether the search ends here.
    """

    name: str
    seconds: Callable[[Reduced], float]
    run: Callable[[Reduced], bool]


def apply_methods(reduced: Reduced) -> None:
    """Search with one method after the other, until one of them ends the search."""
    for method in METHODS:
        if method.seconds(reduced) < reduced.search.seconds and method.run(reduced):
            return


def _choice_seconds(reduced: Reduced) -> float:
    """Return 0 if a choice is missed that an elimination would not find as quickly, else inf."""
    if reduced.search.choice is not None or reduced.large:
        return math.inf
    quick = elimination_in_time(reduced) and reduced.elimination.work <= QUICK_WORK
    return math.inf if reduced.memory is None and quick else 0.0


def _offer_consistent(reduced: Reduced) -> bool:
    chosen = consistent_start(reduced.network, reduced.memory, reduced.search.until)
    if chosen is not None:
        reduced.search.offer(reduced.network.expand(chosen), "start")
    return False


def _worker_seconds(reduced: Reduced) -> float:
    return 0.0 if reduced.workers.started else WORKER_SECONDS


def _search_in_workers(reduced: Reduced) -> bool:
    workers, search = reduced.workers, reduced.search
    workers.start(search.seconds)
    workers.hand_over(reduced.network, reduced.memory)
    reduced.find_start()
    workers.collect(reduced.network, search)
    reduced.find_smallest_memory()
    return True


METHODS = (
    Method("first choice", _choice_seconds, _offer_consistent),
    Method("direct", direct_seconds, solve_direct),
    Method("uncompiled sweeps", sweeps_seconds, sweep),
    Method("narrowing", narrowing_seconds, solve_narrowed),
    Method("brief rounds", short_seconds, search_briefly),
    Method("counted rounds", counted_seconds, search_counted),
    Method("worker processes", _worker_seconds, _search_in_workers),
)
