"""What a layer needs at least on a mesh, whatever its strategies: floors of a bound.

For the ways x to run one layer alone, whose neighbours hand over and take whatever it likes, with
B microbatches and seconds t(x) of each and u(x) per step, the least

    L(p) = min over x of B t(x) + u(x) + p state(x)

is a selection problem of one layer, without the strategies that split the batch into more parts
than the samples of a microbatch allow. Prices p are those at which two of the menu's rows tie: the
rows that are the best at some price are near the corners of what all ways reach. -> _prices()

What a strategy costs at a number of microbatches lies on a line through two sizes of the menu, and
rows take the least size that their microbatches divide: floors take the lowest of these lines. A
kernel may take less than its line says, being bound by memory below some size and by operations
above: between two sizes floors are not above what such kernels take at least (`_led_to`). What
recomputation runs again counts at its cheapest, and what a layer keeps at its least. -> _at()

Layers that follow one another take more, since one reads what the other hands over.  -> layer_runs
L is concave in B among sizes that allow the same ways, between two sizes of the menu, so it is
solved for at a few. -> _Curves
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

import ilp_sharding
from alpa_interchange import ShardingProblem
from alpa_interchange.menu import Affine, KeptFloor, LayerFloor, LayerRow, PricedFloor
from alpa_meta.inter_op.layer_runs import Links, Potential, in_a_run, potential, span
from alpa_meta.intra_op.memory_limit import solve
from alpa_meta.options import Options

if TYPE_CHECKING:
    from alpa_meta.inter_op.mesh_rows import MeshProblem

# Beside none. Two, found by halving the hull, left GPT-39B on 64 V100 a gap of 8.3 %, three one of
# 5.9 %.
MAX_PRICES = 3
# Of a floor's seconds. With 1e-2 planning GPT-1.3B on 4 V100 takes a tenth less for a gap of 5.15 %
# instead of 4.86 %; with 5e-4 a twentieth more, for 4.85 %.
TOLERANCE = 2e-3
# Of a floor's seconds, by which a straight line between two solved numbers of microbatches may be
# too low.
NEAR = 2 * TOLERANCE


PARTS = ("seconds", "forward_and_input", "backward")
"""What a layer's microbatches take, all phases first, and those that pipelines wait for. The
forward pass alone counts at the least of each operator: solved for, too, the bounds of GPT-39B and
LLaMA-8B are within 1e-4 the same. Of rare classes only the first is solved for: all three raise
GPT-39B's bound by 0.14 % for a fifth more of the seconds of floors."""

# Kinds of recomputation that are solved for: what others take beside the last of these is counted
# at its least. With none solved for, GPT-39B's gap is 8 %.
SOLVED_KINDS = 2

_Asked = float | str
"""A price of bytes that is added to the seconds per step, or one of PARTS."""


@frozen(eq=False, slots=False)
class _Ways:
    """A layer's problem with a number of microbatches. `state` are the bytes of each node's
    strategies, `bytes` those that no node decides. `links`: to another such layer after it."""

    problem: ShardingProblem
    parts: Mapping[str, ShardingProblem]  # by PARTS
    state: np.ndarray
    bytes: float
    links: Links = ()

    @functools.cached_property
    def _least_state(self) -> np.ndarray:
        """Return the least bytes of each node."""
        counts = self.problem.num_strategies
        return np.asarray(np.minimum.reduceat(self.state, np.cumsum(counts) - counts))

    @property
    def fewest(self) -> float:
        """Return the least bytes."""
        return self.bytes + float(self._least_state.sum())

    def least(self, asked: _Asked, options: Options) -> tuple[float, tuple[int, ...] | None]:
        """Return a bound on what is asked and the way found; inf where there is none."""
        found = solve(self._of(asked), options, tolerance=TOLERANCE)
        if found.choice is None or found.lower_bound is None:
            return math.inf, None
        return found.lower_bound + self._fixed(asked), found.choice

    def raised(self, least: float, start: Potential, options: Options) -> Potential:
        """Return a potential by which a run of layers takes more than the `least` of each."""
        alone = self._priced(0.0)
        return potential(alone, self.links, start, least, options, TOLERANCE)

    def following(self, price: float, least: float, numbers: Potential, options: Options) -> float:
        """Return how much more than the `least` of a layer alone every further one of a run takes
        at least."""
        problem = in_a_run(self._priced(price), self.links, numbers)
        bound = solve(problem, options, tolerance=TOLERANCE).lower_bound
        return 0.0 if bound is None else bound + self._fixed(price) - span(numbers) - least

    def of(self, asked: _Asked, choice: tuple[int, ...]) -> float:
        """Return what is asked of a way."""
        return ilp_sharding.check(self._of(asked), choice).cost + self._fixed(asked)

    def _of(self, asked: _Asked) -> ShardingProblem:
        return self.parts[asked] if isinstance(asked, str) else self._priced(asked)

    def _fixed(self, asked: _Asked) -> float:
        return 0.0 if isinstance(asked, str) else asked * self.fewest

    def _priced(self, price: float) -> ShardingProblem:
        """Return the problem with the bytes beyond the fewest at a price, which leaves to the
        solver's tolerance what is to be chosen."""
        more = self.state - np.repeat(self._least_state, self.problem.num_strategies)
        return evolve(self.problem, node_cost=self.problem.node_cost + price * more)


class _Curves:
    """The least L(p) of a class over the number of microbatches, for sizes that allow the same
    ways, and those of B t(x) alone, by PARTS; all for each of `kinds` of recomputation.

    Of one way, B t + u is a line over B: the least of all is concave, no lower than a straight line
    between two numbers it was solved at, and no higher than the ways found there.
    """

    def __init__(self, prices: Sequence[float], kinds: Sequence[str], parts: Sequence[str]) -> None:
        self.prices, self.kinds, self.parts = prices, kinds, parts
        asked: list[_Asked] = [*prices, *parts]
        self._asked = [(kind, one) for kind in kinds for one in asked]
        self.fewest = 0.0  # bytes of state
        # By number of microbatches, by how much more than `_least` every further layer of a run
        # takes, and by how much less the run may take.
        self._follow: dict[int, tuple[float, float]] = {}
        self._potential: Potential = {}
        self._least: dict[int, list[float]] = {}  # by number of microbatches
        self._found: dict[tuple[str, _Asked, tuple[int, ...]], dict[int, float]] = {}

    def beyond(self, count: int) -> bool:
        """Return whether all that was solved for is fewer microbatches."""
        return max(self._least, default=count) < count

    def solve(self, count: int, ways: Mapping[str, _Ways], options: Options) -> list[float]:
        """Return bounds for `count` microbatches, whose ways these are by kind: for each kind one
        for each price, and those of PARTS."""
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
        self, ways: Mapping[str, _Ways], options: Options, least: Sequence[float]
    ) -> tuple[float, float]:
        numbers = ways[self.kinds[0]].raised(least[0], self._potential, options)
        if not numbers:
            return 0.0, 0.0
        self._potential = numbers
        more = [
            ways[kind].following(asked, bound, numbers, options)
            for (kind, asked), bound in zip(self._asked, least, strict=True)
            if not isinstance(asked, str)
        ]
        return max(min(more), 0.0), span(numbers)

    def by_kind(self, least: Sequence[float]) -> np.ndarray:
        """Return [kinds, prices and PARTS] the bounds of `solve`."""
        return np.array(least).reshape(len(self.kinds), -1)

    def follow(self, count: int) -> tuple[float, float]:
        """Return the seconds by which every further layer of a run takes more than `at` says, and
        those by which the run may take less, for a number of microbatches that `at` knows."""
        counts = sorted(self._follow)
        if not counts or not counts[0] <= count <= counts[-1]:
            return 0.0, 0.0
        both = [np.interp(count, counts, [self._follow[one][k] for one in counts]) for k in (0, 1)]
        return float(both[0]), float(both[1])


def _lines(row: LayerRow) -> tuple[Affine, ...]:
    return row.forward, row.backward_input, row.backward_weight


class FloorSource:
    """Floors of the layers of one mesh. `layers[class]`: the layer of the window that stands for
    those of a class; `kinds`: of recomputation that are told apart; `tight`: memory may matter, of
    classes that come `often`. `rows[class]` are those of the menu; `neighbours[class]` two
    layers of the window that stand for any two in a row."""

    def __init__(
        self,
        problem: MeshProblem,
        layers: Sequence[int],
        kinds: Sequence[str],
        options: Options,
        tight: bool,
        often: Sequence[bool],
        rows: Sequence[Sequence[LayerRow]],
        neighbours: Mapping[int, tuple[int, int]],
    ) -> None:
        self.rows, self.neighbours = rows, neighbours
        self.problem, self.layers, self.kinds, self.often = problem, layers, kinds, often
        self.options, self.tight = options, tight
        self._sizes = sorted(problem.sizes, key=lambda one: one.samples)
        self.batch = problem.main.samples * problem.main.count
        self._known: dict[tuple[int, int], tuple[LayerFloor, ...]] = {}
        self._curves: dict[Hashable, _Curves] = {}
        self._tables: dict[tuple[str, int], np.ndarray] = {}  # seconds, by kind and samples

    def all_ways(self, number: int) -> LayerFloor:
        """Return a floor of a class that holds for any microbatch: per sample as in the largest,
        since what runs for fewer runs for their multiples."""
        layer, size = self.layers[number], self.problem.sizes.index(self._sizes[-1])
        seconds = self.problem.costs.seconds_of("least").tables[size]
        found = solve(self.problem.costs.layer_problem(layer, seconds), self.options)
        each = (found.lower_bound or 0.0) / self.batch
        return self._floor(layer, (PricedFloor(seconds=Affine(0.0, each)),), 0.0, {"least": 0.0})

    def exact(self, number: int, samples: int) -> tuple[LayerFloor, ...]:
        """Return the floors of a class for microbatches of so many samples, none where there are
        no ways."""
        if (number, samples) not in self._known:
            self._known[number, samples] = self._exact(number, samples)
        return self._known[number, samples]

    def _exact(self, number: int, samples: int) -> tuple[LayerFloor, ...]:
        layer, count = self.layers[number], self.batch // samples
        allowed = {int(x) for one in self.problem.splits for x in one if samples % int(x) == 0}
        alone = samples if samples > self._sizes[-1].samples else None  # beyond all lines
        between = sum(one.samples < samples for one in self._sizes)
        at_size = any(one.samples == samples for one in self._sizes)
        key = (number, alone, frozenset(allowed), between, at_size)
        if key not in self._curves:
            often = self.often[number]
            prices = self._prices(number, samples) if self.tight and often else [0.0]
            self._curves[key] = _Curves(
                prices, self.kinds[:SOLVED_KINDS] or ("least",), PARTS if often else PARTS[:1]
            )
        curves = self._curves[key]
        if curves.beyond(count) and not at_size:
            fewest = self._fewest(samples, between, math.lcm(*allowed))
            if fewest < samples:
                ways = self._ways(number, fewest, curves)
                curves.solve(self.batch // fewest, ways, self.options)
        least = curves.at(count)
        if least is None:
            ways = self._ways(number, samples, curves)
            least = curves.solve(count, ways, self.options)
        if math.isinf(least[0]):
            return ()
        by_kind, num_prices = curves.by_kind(least), len(curves.prices)
        of_all = by_kind.min(axis=0)
        priced = tuple(
            PricedFloor(price=price, step_seconds=max(one, 0.0))
            for price, one in zip(curves.prices, of_all[:num_prices].tolist(), strict=True)
        )
        # beside each of what is said of the sums of seconds
        above = (by_kind - of_all)[:, : num_prices + 1].min(axis=1).tolist()
        by_name = dict(zip(curves.kinds, above, strict=True))
        floor = self._floor(layer, priced, curves.fewest, by_name)
        parts: dict[str, Any] = {
            name: Affine(0.0, max(one / self.batch, getattr(floor, name).each))
            for name, one in zip(curves.parts, of_all[num_prices:].tolist(), strict=True)
        }
        more, less = curves.follow(count)
        return (evolve(floor, **parts, follow_seconds=more, run_seconds=less),)

    def _fewest(self, samples: int, between: int, multiple: int) -> int:
        """Return the fewest samples above the menu's first sizes, `between` of them, that allow
        what `multiple` of them allow."""
        above = self._sizes[between - 1].samples if between else 0
        first = (above // multiple + 1) * multiple
        return next(
            (one for one in range(first, samples, multiple) if self.batch % one == 0), samples
        )

    def _floor(
        self,
        layer: int,
        priced: tuple[PricedFloor, ...],
        state: float,
        above: Mapping[str, float],
    ) -> LayerFloor:
        """Return the floor of a layer; `above`: by kind, how much more than `priced` it takes per
        step at least. Other kinds are counted beside the last of these."""
        costs, last = self.problem.costs, self.problem.sizes.index(self._sizes[-1])
        least = costs.least(layer, last)
        beside = list(above)[-1]

        def more(kind: str) -> float:
            if kind in above:
                return above[kind]
            return max(above[beside] + costs.least_again(layer, kind, last, beside), 0.0)

        again = [more(kind) / self.batch for kind in self.kinds]

        def column(*names: str) -> Affine:
            return Affine(0.0, sum(least[name] for name in names) / self.batch)

        return LayerFloor(
            seconds=column("forward", "backward"),
            forward=column("forward"),
            forward_and_input=column("forward", "backward_input"),
            backward=column("backward"),
            step_seconds=least["update"],
            state_bytes=state,
            delayed_bytes=self._line(functools.partial(costs.least_delayed, layer)),
            priced=priced,
            kept=tuple(
                KeptFloor(
                    seconds=Affine(0.0, more),
                    activation_bytes=self._line(functools.partial(costs.least_kept, layer, kind)),
                )
                for kind, more in zip(self.kinds, again, strict=True)
            ),
        )

    def _line(self, bytes_at: Callable[[int], float]) -> Affine:
        """Return what a microbatch keeps by the place of its size: a line, as bytes grow with
        samples."""
        here, there = self._sizes[0], self._sizes[-1]
        near, far = (bytes_at(self.problem.sizes.index(one)) for one in (here, there))
        if here is there:
            return Affine(0.0, near / here.samples)
        each = max((far - near) / (there.samples - here.samples), 0.0)
        return Affine(max(near - each * here.samples, 0.0), each)

    def _prices(self, number: int, samples: int) -> list[float]:
        """Return 0 and the least prices of state at which two rows of a class tie, of those that
        are the best at some price."""
        count = self.batch // samples
        points = [
            (
                count * sum(line.value(samples) for line in _lines(row)) + row.step_seconds,
                row.state_bytes,
            )
            for row in self.rows[number]
            if samples % row.batch_split == 0
        ]
        prices = [0.0]
        here = min(points, default=(0.0, 0.0))
        while len(prices) <= MAX_PRICES:
            ties = [((p[0] - here[0]) / (here[1] - p[1]), p) for p in points if p[1] < here[1]]
            if not ties:
                break
            price, here = min(ties)
            prices.append(price)
        return sorted(set(prices))

    def _ways(self, number: int, samples: int, curves: _Curves) -> dict[str, _Ways]:
        """Return the ways to run a layer of a class with microbatches of so many samples, by kind
        of recomputation."""
        return {kind: self._ways_of(number, samples, kind, curves.parts) for kind in curves.kinds}

    def _ways_of(self, number: int, samples: int, kind: str, parts: Sequence[str]) -> _Ways:
        problem, layer = self.problem, self.layers[number]
        sizes = [problem.sizes.index(one) for one in self._sizes]
        if (kind, samples) not in self._tables:
            seconds = problem.costs.seconds_of(kind)
            costs = [seconds.tables[size] for size in sizes]
            self._tables[kind, samples] = self._at(costs, samples)
        table = self._tables[kind, samples]
        alone = problem.costs.layer_problem(layer, table, kind=kind)
        numbers = [int(name) for name in alone.node_names]
        # of a single microbatch, gradients come where activations go
        held = ("state", "gradients") if samples < self.batch else ("state",)
        state, rest = problem.costs.layer_bytes(layer, held)
        counts = alone.num_strategies.tolist()
        by_node = [state.pop(n, np.zeros(k)) for n, k in zip(numbers, counts, strict=True)]
        return _Ways(
            self._splitting(alone, samples),
            {
                part: self._splitting(
                    problem.costs.layer_problem(layer, table, part, kind), samples
                )
                for part in parts
            },
            np.concatenate(by_node),
            rest + sum(float(one.min()) for one in state.values()),
            self._links(number, numbers, table, kind),
        )

    def _splitting(self, alone: ShardingProblem, samples: int) -> ShardingProblem:
        """Return the problem without strategies that split the batch into parts that do not divide
        the samples."""
        splits = [self.problem.splits[int(name)] for name in alone.node_names]
        wrong = samples % np.concatenate([np.ones(0, np.int64), *splits]) != 0
        return evolve(alone, node_cost=np.where(wrong, math.inf, alone.node_cost))

    def _links(self, number: int, nodes: Sequence[int], table: np.ndarray, kind: str) -> Links:
        """Return what two layers of a class in a row read from one another, none where the window
        has no two that stand for all, by the places of their `nodes`."""
        if number not in self.neighbours:
            return ()
        place = {node: k for k, node in enumerate(nodes)}
        return [
            (place[before], place[after], seconds)
            for before, after, seconds in self.problem.costs.between(
                self.neighbours[number], table, kind
            )
            if before in place and after in place
        ]

    def _at(self, costs: Sequence[np.ndarray], samples: int) -> np.ndarray:
        """Return seconds per step with microbatches of so many samples from those at each size: the
        least on the lines of all rows that may be."""
        last, count = self._sizes[-1], self.batch // samples
        sizes, longest = self._sizes, len(self._sizes) - 1
        found: list[np.ndarray] = []
        starts = set()
        for k in {int(x) for one in self.problem.splits for x in one if samples % int(x) == 0}:
            own = [n for n, one in enumerate(sizes) if one.samples % k == 0]
            if own and own[0] < longest:
                starts.add(own[0])
            else:  # rows through one size take as long per sample at any other
                found += [costs[-1]] if own else costs
        for n in sorted(starts):
            with np.errstate(invalid="ignore"):
                slope = (costs[n] - costs[-1]) / (sizes[n].count - last.count)
                line = costs[-1] + slope * (count - last.count)
                # Rows whose line would fall with B stay at their value at the smaller size.
                line = np.where(slope < 0, np.minimum(line, costs[n]), line)
                line = np.minimum(line, self._led_to(costs, samples))
            if count < last.count:
                line = np.maximum(line, 0.0)
            found.append(np.where(np.isfinite(line), line, costs[n]))
        return np.asarray(np.min(found, axis=0))

    def _led_to(self, costs: Sequence[np.ndarray], samples: int) -> np.ndarray:
        """Return the seconds per step that a kernel takes at least with so many samples, by those
        at the sizes of the menu: inf where they say nothing.

        Its seconds grow with samples, and from size to size not less than before. Of what follows
        from the sizes above and from the one below, the better halfway between them is taken, so
        that it is a line over B.
        """
        sizes, count = self._sizes, self.batch // samples
        below = [n for n, one in enumerate(sizes) if one.samples < samples]
        above = [n for n, one in enumerate(sizes) if one.samples >= samples]
        if not above:
            return np.full_like(costs[-1], math.inf)
        if sizes[above[0]].samples == samples:
            return np.where(np.isfinite(costs[above[0]]), costs[above[0]], math.inf)
        most = sizes[below[-1]].count if below else self.batch
        middle = math.sqrt(sizes[above[0]].count * most)

        def led(at: float) -> tuple[np.ndarray, np.ndarray]:
            first = costs[above[0]]
            with np.errstate(invalid="ignore"):
                from_above = np.array(first)
                if len(above) > 1:
                    here, there = (sizes[n].count for n in above[:2])
                    rise = np.maximum((first - costs[above[1]]) / (here - there), 0.0)
                    rise = np.where(np.isfinite(rise), rise, 0.0)
                    from_above = first + rise * (at - here)
                from_below = (
                    costs[below[-1]] * (at / most) if below else np.full_like(first, -math.inf)
                )
            found = (np.where(np.isfinite(one), one, -math.inf) for one in (from_above, from_below))
            return tuple(found)  # type: ignore[return-value]

        above_better = np.greater_equal(*led(middle))
        best = np.where(above_better, *led(count))
        return np.where(np.isfinite(best), best, math.inf)
