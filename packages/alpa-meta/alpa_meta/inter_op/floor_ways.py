"""Lower bounds on what the layers of a class take with microbatches of one size, whatever way they
are run: of their seconds, of parts of these, and of seconds with bytes at a price."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve, field, frozen

from alpa_interchange import ShardingProblem, ShardingSolution
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
from alpa_meta.types import Floats

# Of a floor's seconds. With 1e-2 planning GPT-1.3B on 4 V100 takes a tenth less for a gap of 5.15 %
# instead of 4.86 %; with 5e-4 a twentieth more, for 4.85 %.
TOLERANCE = 2e-3

PARTS = ("seconds", "forward", "forward_and_input", "backward")
"""What a layer's microbatches take, all phases first, and those that pipelines wait for. With the
forward pass alone at the least of each operator, the joint bound of LLaMA-8B on 64 H100 is 0.7 %
lower for 0.3 CPU s less, that of GPT-39B the same. Of rare classes only the first is solved for:
all of them raise GPT-39B's bound by 0.14 % for a fifth more of the seconds of floors."""

Asked = tuple[str, float]
"""The seconds of "all" or of one of PARTS, with bytes at a price; of BARE those of state alone."""
BARE = "bare_step"


Known = tuple[ShardingProblem, ShardingSolution]


@frozen(eq=False, slots=False)
class Ways:
    """A layer's problem with a number of microbatches. `state` are the bytes of each node's
    strategies, `bytes` those that no node decides; `held` and `held_bytes` the same with what a
    microbatch keeps beyond the least. `links`: to another such layer after it. `known`: what was
    solved of these and of other ways: kinds of recomputation are one where a layer keeps nothing
    (16 Evoformer blocks with nn.remat: half of 240 CPU s of floors).
    """

    problem: ShardingProblem
    parts: Mapping[str, ShardingProblem]  # by PARTS
    state: Floats
    bytes: float
    held: Floats
    held_bytes: float
    links: Links = ()
    known: list[Known] = field(factory=list)

    @functools.cached_property
    def _least(self) -> Mapping[bool, Floats]:
        """Return the least bytes of each node, by whether they are those of state only."""
        counts = self.problem.num_strategies
        starts = np.cumsum(counts) - counts
        both = {True: self.state, False: self.held}
        return {bare: np.minimum.reduceat(bytes, starts) for bare, bytes in both.items()}

    @property
    def fewest(self) -> float:
        """Return the least bytes of state."""
        return self.bytes + float(self._least[True].sum())

    def least(self, asked: Asked, options: Options) -> float:
        """Return a bound on what is asked; inf where there is no way."""
        found = self._bounded(self._of(asked), options)
        if found.choice is None or found.lower_bound is None:
            return math.inf
        return found.lower_bound + self._fixed(asked)

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
        return (self._bounded(problem, options).lower_bound or 0.0) + self._fixed(asked)

    def _bounded(self, problem: ShardingProblem, options: Options) -> ShardingSolution:
        """Return a solution of one of these problems whose bound alone is used."""
        for other, found in self.known:
            if _same(problem, other):
                return found
        found = solve(problem, options, tolerance=TOLERANCE, bound_only=True)
        self.known.append((problem, found))
        return found

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


def _same(problem: ShardingProblem, other: ShardingProblem) -> bool:
    """Return whether two problems of one layer have the same costs, and so the same bound."""
    return (
        np.array_equal(problem.node_cost, other.node_cost)
        and np.array_equal(problem.num_strategies, other.num_strategies)
        and np.array_equal(problem.edges, other.edges)
        and np.array_equal(problem.edge_cost, other.edge_cost)
    )


class LeastOfKinds:
    """What a class takes at least with microbatches of one size: the seconds of a step, with a
    light update at `prices` of bytes, and `parts`; all in the `ways` of each kind of recomputation.
    `bare`: that at prices of state only as well, for the last kind. `start`: a potential of such
    layers, if one is known.

    `by_kind` [kinds, what is asked], of which the first `num_sums` are sums that floors are of;
    `others` [sums]: what is less than that of any other kind of recomputation by what it takes at
    least more than the last one. `more`: seconds by which every further layer of a run takes more;
    `less`: by which the run may take less; `potential`: the one that says so.
    """

    def __init__(
        self,
        ways: Mapping[str, Ways],
        prices: Sequence[float],
        parts: Sequence[str],
        options: Options,
        *,
        bare: bool = False,
        start: Potential | None = None,
    ) -> None:
        kinds = list(ways)
        sums: list[Asked] = [("all", 0.0), *(("light_step", price) for price in prices)]
        sums.append((parts[0], 0.0))
        asked = [*sums, *((part, 0.0) for part in parts[1:])]
        self.num_sums = len(sums)
        self.by_kind = np.array([[ways[k].least(one, options) for one in asked] for k in kinds])
        last = ways[kinds[-1]]
        of_state = [last.least((BARE, price), options) for price in prices if bare]
        self.others = self.by_kind[-1, : self.num_sums].copy()
        self.others[1 : 1 + len(of_state)] = np.minimum(
            self.others[1 : 1 + len(of_state)], of_state
        )
        self.possible = bool(np.isfinite(self.by_kind[0, 0]))
        self.more = self.less = 0.0
        self.potential = start or {}
        first = ways[kinds[0]]
        self.fewest = first.fewest  # bytes of state
        if first.links and np.isfinite(self.by_kind).all() and np.isfinite(of_state).all():
            self._follow(ways, sums, options)

    def _follow(self, ways: Mapping[str, Ways], sums: Sequence[Asked], options: Options) -> None:
        first = next(iter(ways.values()))
        numbers = first.raised(float(self.by_kind[0, 0]), self.potential, options)
        if not numbers:
            return
        self.potential = numbers
        cells = [
            (one, way, float(self.by_kind[row, column]))
            for row, way in enumerate(ways.values())
            for column, one in enumerate(sums)
        ]
        more = min(way.following(one, numbers, options) - bound for one, way, bound in cells)
        if more <= 0:
            return
        # What the ends of a run take more than alone, each of any kind of recomputation.
        above: dict[Asked, Floats] = {}
        for one, way, bound in cells:
            here = np.array(way.ends(one, numbers, options)) - bound
            above[one] = np.minimum(above.get(one, here), here)
        self.more = more
        self.less = max(more - min(float(both.sum()) for both in above.values()), 0.0)
