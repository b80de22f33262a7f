"""What a layer needs at least on a mesh, whatever its strategies: floors of a bound.

For the ways x to run one layer alone, whose neighbours hand over and take whatever it likes, with
B microbatches and seconds t(x) of each and u(x) per step, the least

    L(p) = min over x of B t(x) + u(x) + p state(x)

is a selection problem of one layer, without the strategies that split the batch into more parts
than the samples of a microbatch allow. Prices p are those at which the cheapest choices of two
known prices tie: each is a corner of the hull of seconds over bytes.        -> _with_prices()

What a strategy costs at a number of microbatches lies on a line through two sizes of the menu, and
rows take the least size that their microbatches divide: floors take the lowest of these lines. What
recomputation runs again counts at its cheapest, and what a layer keeps at its least.
                                                                             -> FloorSource._at()
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from alpa_interchange import ShardingProblem
from alpa_interchange.menu import Affine, KeptFloor, LayerFloor, PricedFloor
from alpa_meta.intra_op.memory_limit import solve
from alpa_meta.options import Options

if TYPE_CHECKING:
    from alpa_meta.inter_op.mesh_rows import MeshProblem

MAX_PRICES = 3  # beside none
SAME_BYTES = 0.1  # of the bytes between the ends of a hull: corners nearer than that are one
TOLERANCE = 1e-3  # of a floor's seconds


@frozen(eq=False)
class _Ways:
    """A layer's problem with a number of microbatches. `state` are the bytes of each node's
    strategies, `bytes` those that no node decides."""

    problem: ShardingProblem
    state: np.ndarray
    bytes: float

    @property
    def starts(self) -> np.ndarray:
        counts = self.problem.num_strategies
        return np.asarray(np.cumsum(counts) - counts)

    @property
    def fewest(self) -> float:
        """Return the least bytes."""
        return self.bytes + float(np.minimum.reduceat(self.state, self.starts).sum())

    def least(self, price: float, options: Options) -> tuple[float, float]:
        """Return a bound on seconds + price * bytes, and the bytes of the best choice."""
        priced = evolve(self.problem, node_cost=self.problem.node_cost + price * self.state)
        found = solve(priced, options, tolerance=TOLERANCE)
        if found.choice is None or found.lower_bound is None:
            return math.inf, math.inf
        held = self.bytes + float(self.state[self.starts + np.array(found.choice)].sum())
        return found.lower_bound + price * self.bytes, held


class FloorSource:
    """Floors of the layers of one mesh. `layers[class]`: the layer of the window that stands for
    those of a class; `kinds`: of recomputation that are told apart; `tight`: memory may matter."""

    def __init__(
        self,
        problem: MeshProblem,
        layers: Sequence[int],
        kinds: Sequence[str],
        options: Options,
        tight: bool,
    ) -> None:
        self.problem, self.layers, self.kinds = problem, layers, kinds
        self.options, self.tight = options, tight
        self._sizes = sorted(problem.sizes, key=lambda one: one.samples)
        self.batch = problem.main.samples * problem.main.count
        self._known: dict[tuple[int, int], tuple[LayerFloor, ...]] = {}

    def all_ways(self, number: int) -> LayerFloor:
        """Return a floor of a class that holds for any microbatch: per sample as in the largest,
        since what runs for fewer runs for their multiples."""
        layer, size = self.layers[number], self.problem.sizes.index(self._sizes[-1])
        found = solve(self.problem.costs.layer_problem(layer, size), self.options)
        each = (found.lower_bound or 0.0) / self.batch
        return self._floor(layer, (PricedFloor(seconds=Affine(0.0, each)),), 0.0)

    def exact(self, number: int, samples: int) -> tuple[LayerFloor, ...]:
        """Return the floors of a class for microbatches of so many samples, none where there are
        no ways."""
        if (number, samples) not in self._known:
            self._known[number, samples] = self._exact(self.layers[number], samples)
        return self._known[number, samples]

    def _exact(self, layer: int, samples: int) -> tuple[LayerFloor, ...]:
        ways = self._ways(layer, samples)
        known = {0.0: ways.least(0.0, self.options)}
        if math.isinf(known[0.0][0]):
            return ()
        if self.tight:
            known = self._with_prices(ways, known)
        priced = tuple(
            PricedFloor(price=price, step_seconds=least)
            for price, (least, _) in sorted(known.items())
        )
        return (self._floor(layer, priced, ways.fewest),)

    def _floor(self, layer: int, priced: tuple[PricedFloor, ...], state: float) -> LayerFloor:
        costs, last = self.problem.costs, self.problem.sizes.index(self._sizes[-1])
        least = costs.least(layer, last)
        again = [costs.least_again(layer, kind, last) / self.batch for kind in self.kinds]

        def column(name: str) -> Affine:
            return Affine(0.0, least[name] / self.batch)

        return LayerFloor(
            seconds=Affine(0.0, (least["forward"] + least["backward"]) / self.batch),
            forward=column("forward"),
            backward_input=column("backward_input"),
            backward_weight=column("backward_weight"),
            step_seconds=least["update"],
            state_bytes=state,
            priced=priced,
            kept=tuple(
                KeptFloor(seconds=Affine(0.0, more), activation_bytes=self._kept(layer, kind))
                for kind, more in zip(self.kinds, again, strict=True)
            ),
        )

    def _kept(self, layer: int, kind: str) -> Affine:
        """Return the least bytes that a microbatch keeps: a line, as bytes grow with samples."""
        here, there = self._sizes[0], self._sizes[-1]
        near, far = (
            self.problem.costs.least_kept(layer, kind, self.problem.sizes.index(one))
            for one in (here, there)
        )
        if here is there:
            return Affine(0.0, near / here.samples)
        each = max((far - near) / (there.samples - here.samples), 0.0)
        return Affine(max(near - each * here.samples, 0.0), each)

    def _with_prices(
        self, ways: _Ways, known: Mapping[float, tuple[float, float]]
    ) -> dict[float, tuple[float, float]]:
        """Return {price: (least, bytes)} with those prices where cheapest choices tie."""
        result = dict(known)
        ((_, (seconds, most)),) = known.items()
        room = most - ways.fewest
        if room <= SAME_BYTES * most:
            return result
        # Dear enough that bytes decide: the corner where the least state takes the least seconds.
        top = 100 * seconds / room
        result[top] = ways.least(top, self.options)
        for _ in range(MAX_PRICES - 1):
            pairs = itertools.pairwise(sorted(result))
            low, high = max(pairs, key=lambda pair: result[pair[0]][1] - result[pair[1]][1])
            (least, held), (its_least, its_held) = result[low], result[high]
            if held - its_held <= SAME_BYTES * room:
                break
            before, after = least - low * held, its_least - high * its_held
            price = (after - before) / (held - its_held)
            if not low < price < high:
                break
            result[price] = ways.least(price, self.options)
        return result

    def _ways(self, layer: int, samples: int) -> _Ways:
        """Return the ways to run a layer with microbatches of so many samples."""
        problem = self.problem
        sizes = [problem.sizes.index(one) for one in self._sizes]
        alone = [problem.costs.layer_problem(layer, size) for size in sizes]
        numbers = [int(name) for name in alone[0].node_names]
        wrong = np.concatenate([samples % problem.splits[n] != 0 for n in numbers])
        node_cost = self._at([one.node_cost for one in alone], samples)
        state, rest = problem.costs.layer_bytes(layer, ("state", "gradients"))
        counts = alone[0].num_strategies.tolist()
        by_node = [state.pop(n, np.zeros(k)) for n, k in zip(numbers, counts, strict=True)]
        return _Ways(
            evolve(
                alone[0],
                node_cost=np.where(wrong, math.inf, node_cost),
                edge_cost=self._at([one.edge_cost for one in alone], samples),
            ),
            np.concatenate(by_node),
            rest + sum(float(one.min()) for one in state.values()),
        )

    def _at(self, costs: Sequence[np.ndarray], samples: int) -> np.ndarray:
        """Return seconds per step with microbatches of so many samples from those at each size: the
        least on the lines of all rows that may be."""
        last, count = self._sizes[-1], self.batch // samples
        starts = {
            next((n for n, one in enumerate(self._sizes) if one.samples % k == 0), None)
            for k in {int(x) for one in self.problem.splits for x in one}
            if samples % k == 0
        }
        result = costs[-1]
        for n in starts - {None, len(self._sizes) - 1}:
            here = self._sizes[n]
            with np.errstate(invalid="ignore"):
                slope = (costs[n] - costs[-1]) / (here.count - last.count)
                line = costs[-1] + slope * (count - last.count)
                # Rows whose line would fall with B stay at their value at the smaller size.
                line = np.where(slope < 0, np.minimum(line, costs[n]), line)
            line = np.where(np.isfinite(line), np.maximum(line, 0.0), costs[n])
            result = line if result is costs[-1] else np.minimum(result, line)
        return result
