"""Lower bounds on a layer's seconds as curves over the number of microbatches, solved at a few.

Of one way, B t(x) + u(x) + p state(x) is a line over B, so the least of all ways is concave: no
lower than a straight line between two numbers it was solved at, and no higher than the ways found
there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve, frozen

import ilp_sharding
from alpa_interchange import ShardingProblem
from alpa_meta.inter_op.layer_runs import (
    Links,
    Potential,
    first_in_a_run,
    in_a_run,
    potential,
    span,
)
from alpa_meta.intra_op.memory_limit import solve
from alpa_meta.options import Options

# Of a floor's seconds. With 1e-2 planning GPT-1.3B on 4 V100 takes a tenth less for a gap of 5.15 %
# instead of 4.86 %; with 5e-4 a twentieth more, for 4.85 %.
TOLERANCE = 2e-3
# Of a floor's seconds, by which a straight line between two solved numbers of microbatches may be
# too low.
NEAR = 2 * TOLERANCE

PARTS = ("seconds", "forward", "forward_and_input", "backward")
"""What a layer's microbatches take, all phases first, and those that pipelines wait for. With the
forward pass alone at the least of each operator, the joint bound of LLaMA-8B on 64 H100 is 0.7 %
lower for 0.3 CPU s less, that of GPT-39B the same. Of rare classes only the first is solved for:
all of them raise GPT-39B's bound by 0.14 % for a fifth more of the seconds of floors."""

Asked = tuple[str, float]
"""The seconds of "all" or of one of PARTS, with bytes at a price; of BARE those of state alone."""
BARE = "bare_step"


@frozen(eq=False, slots=False)
class Ways:
    """A layer's problem with a number of microbatches. `state` are the bytes of each node's
    strategies, `bytes` those that no node decides; `held` and `held_bytes` the same with what a
    microbatch keeps beyond the least. `links`: to another such layer after it."""

    problem: ShardingProblem
    parts: Mapping[str, ShardingProblem]  # by PARTS
    state: np.ndarray
    bytes: float
    held: np.ndarray
    held_bytes: float
    links: Links = ()

    @functools.cached_property
    def _least(self) -> Mapping[bool, np.ndarray]:
        """Return the least bytes of each node, by whether they are those of state only."""
        counts = self.problem.num_strategies
        starts = np.cumsum(counts) - counts
        both = {True: self.state, False: self.held}
        return {bare: np.minimum.reduceat(bytes, starts) for bare, bytes in both.items()}

    @property
    def fewest(self) -> float:
        """Return the least bytes of state."""
        return self.bytes + float(self._least[True].sum())

    def least(self, asked: Asked, options: Options) -> tuple[float, tuple[int, ...] | None]:
        """Return a bound on what is asked and the way found; inf where there is none."""
        found = solve(self._of(asked), options, tolerance=TOLERANCE)
        if found.choice is None or found.lower_bound is None:
            return math.inf, None
        return found.lower_bound + self._fixed(asked), found.choice

    def raised(self, least: float, start: Potential, options: Options) -> Potential:
        """Return a potential by which a run of layers takes more than the `least` of each."""
        return potential(self.problem, self.links, start, least, options, TOLERANCE)

    def following(self, asked: Asked, numbers: Potential, options: Options) -> float:
        """Return what every layer of a run but the first and the last takes at least."""
        problem = in_a_run(self._of(asked), self.links, numbers)
        return self._bound(problem, asked, options) - span(numbers)

    def ends(self, asked: Asked, numbers: Potential, options: Options) -> tuple[float, float]:
        """Return what the first and the last layer of a run take at least."""
        first = first_in_a_run(self._of(asked), numbers)
        last = in_a_run(self._of(asked), self.links, numbers, last=True)
        ahead = self._bound(last, asked, options) - span(numbers)
        return self._bound(first, asked, options), ahead

    def _bound(self, problem: ShardingProblem, asked: Asked, options: Options) -> float:
        bound = solve(problem, options, tolerance=TOLERANCE).lower_bound
        return (bound or 0.0) + self._fixed(asked)

    def of(self, asked: Asked, choice: tuple[int, ...]) -> float:
        """Return what is asked of a way."""
        return ilp_sharding.check(self._of(asked), choice).cost + self._fixed(asked)

    def _fixed(self, asked: Asked) -> float:
        bare = asked[0] == BARE
        bytes = self.bytes if bare else self.held_bytes
        return asked[1] * (bytes + float(self._least[bare].sum()))

    def _of(self, asked: Asked) -> ShardingProblem:
        """Return the problem with the bytes beyond the fewest at a price, which leaves to the
        solver's tolerance what is to be chosen."""
        part, price = asked
        bare = part == BARE
        problem = self.problem if part == "all" else self.parts["light_step" if bare else part]
        if not price:
            return problem
        bytes = self.state if bare else self.held
        more = bytes - np.repeat(self._least[bare], problem.num_strategies)
        return evolve(problem, node_cost=problem.node_cost + price * more)


class Curves:
    """What a class takes at least over the number of microbatches, for sizes that allow the same
    ways: the seconds of a step, with a light update at `prices` of bytes, and `parts`; all for each
    of `kinds` of recomputation. `bare`: that at prices of state only as well, for the last kind."""

    def __init__(
        self, prices: Sequence[float], kinds: Sequence[str], parts: Sequence[str], bare: bool
    ) -> None:
        self.prices, self.kinds, self.parts = prices, kinds, parts
        self._sums: list[Asked] = [("all", 0.0), *(("light_step", price) for price in prices)]
        self._sums.append((parts[0], 0.0))
        asked = [*self._sums, *((part, 0.0) for part in parts[1:])]
        self._asked = [(kind, one) for kind in kinds for one in asked]
        self.num_by_kind = len(self._asked)
        self._asked += [(kinds[-1], (BARE, price)) for price in prices if bare]
        self.fewest = 0.0  # bytes of state
        # By number of microbatches, by how much more than `_least` every further layer of a run
        # takes, and by how much less the run may take.
        self._follow: dict[int, tuple[float, float]] = {}
        self._potential: Potential = {}
        self._least: dict[int, list[float]] = {}  # by number of microbatches
        self._found: dict[tuple[str, Asked, tuple[int, ...]], dict[int, float]] = {}

    def beyond(self, count: int) -> bool:
        """Return whether all that was solved for is fewer microbatches."""
        return max(self._least, default=count) < count

    def solve(self, count: int, ways: Mapping[str, Ways], options: Options) -> list[float]:
        """Return bounds for `count` microbatches, whose ways these are by kind: for each kind what
        the class says."""
        for (kind, asked, choice), values in self._found.items():
            values[count] = ways[kind].of(asked, choice)
        solved = [ways[kind].least(asked, options) for kind, asked in self._asked]
        self._least[count] = [least for least, _ in solved]
        first = ways[self.kinds[0]]
        self.fewest = first.fewest
        if first.links and all(math.isfinite(least) for least, _ in solved):
            self._follow[count] = self._following(ways, options, self._least[count])
        for (kind, asked), (least, found) in zip(self._asked, solved, strict=True):
            if found is not None:
                self._found.setdefault((kind, asked, found), {})[count] = least
        return self._least[count]

    def at(self, count: int) -> list[float] | None:
        """Return what `solve` does; None if what was solved says too little."""
        if count in self._least:
            return self._least[count]
        fewer = max((one for one in self._least if one < count), default=None)
        more = min((one for one in self._least if one > count), default=None)
        if fewer is None or more is None:
            return None
        share = (count - fewer) / (more - fewer)
        result = []
        for n, (kind, asked) in enumerate(self._asked):
            bound = self._least[fewer][n] * (1 - share) + self._least[more][n] * share
            found = [
                values[fewer] * (1 - share) + values[more] * share
                for (*own, _), values in self._found.items()
                if own == [kind, asked] and fewer in values and more in values
            ]
            if min(found, default=math.inf) > bound * (1 + NEAR):
                return None
            result.append(bound)
        return result

    def _following(
        self, ways: Mapping[str, Ways], options: Options, least: Sequence[float]
    ) -> tuple[float, float]:
        numbers = ways[self.kinds[0]].raised(least[0], self._potential, options)
        if not numbers:
            return 0.0, 0.0
        self._potential = numbers
        sums = [
            (asked, ways[kind], bound)
            for (kind, asked), bound in zip(self._asked, least, strict=True)
            if asked in self._sums
        ]
        more = min(way.following(one, numbers, options) - bound for one, way, bound in sums)
        if more <= 0:
            return 0.0, 0.0
        # What the ends of a run take more than alone, each of any kind of recomputation.
        above: dict[Asked, np.ndarray] = {}
        for one, way, bound in sums:
            here = np.array(way.ends(one, numbers, options)) - bound
            above[one] = np.minimum(above.get(one, here), here)
        return more, max(more - min(float(both.sum()) for both in above.values()), 0.0)

    @property
    def num_sums(self) -> int:
        """Return how many of what is asked, the first ones, are sums that floors are of."""
        return len(self._sums)

    def by_kind(self, least: Sequence[float]) -> np.ndarray:
        """Return [kinds, what is asked] the bounds of `solve`."""
        return np.array(least[: self.num_by_kind]).reshape(len(self.kinds), -1)

    def of_others(self, least: Sequence[float]) -> np.ndarray:
        """Return [sums] what is less than the bounds of any other kind of recomputation by what
        that takes at least more than the last one."""
        found = self.by_kind(least)[-1, : self.num_sums].copy()
        bare = least[self.num_by_kind :]
        found[1 : 1 + len(bare)] = np.minimum(found[1 : 1 + len(bare)], bare)
        return found

    def follow(self, count: int) -> tuple[float, float]:
        """Return the seconds by which every further layer of a run takes more than `at` says, and
        those by which the run may take less, for a number of microbatches that `at` knows."""
        counts = sorted(self._follow)
        if not counts or not counts[0] <= count <= counts[-1]:
            return 0.0, 0.0
        both = [np.interp(count, counts, [self._follow[one][k] for one in counts]) for k in (0, 1)]
        return float(both[0]), float(both[1])
