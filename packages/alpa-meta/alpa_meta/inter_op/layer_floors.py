"""What a layer needs at least on a mesh, whatever its strategies: floors of a bound.

For the ways x to run one layer alone, whose neighbours hand over and take whatever it likes, with
B microbatches and seconds t(x) of each and u(x) per step, the least

    L(p) = min over x of B t(x) + q u(x) + p (state(x) + more(x))

are selection problems of one layer, without the strategies that split the batch into more parts
than the samples of a microbatch allow. What x keeps of a microbatch beyond the least of its kind of
recomputation is more(x), where samples are those of a size of the menu: every stage holds one
microbatch at least. Prices p are those at which two of the menu's rows tie: the
rows that are the best at some price are near the corners of what all ways reach. -> _prices()

What a strategy costs at a number of microbatches lies on a line through two sizes of the menu, and
rows take the least size that their microbatches divide: floors take the lowest of these lines. A
kernel may take less than its line says, being bound by memory below some size and by operations
above: between two sizes floors are not above what such kernels take at least, beside their launches
(`_led_to`). What recomputation runs again counts at its cheapest (-> _at()), and what a layer keeps
and works with at its least (-> least_bytes).

Layers that follow one another take more, since one reads what the other hands over.  -> layer_runs
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from alpa_interchange import ShardingProblem
from alpa_interchange.menu import (
    NOTHING,
    Affine,
    KeptFloor,
    LayerFloor,
    LayerRow,
    PricedFloor,
)
from alpa_meta.inter_op.floor_ways import PARTS, Known, LeastOfKinds, Ways
from alpa_meta.inter_op.layer_costs import LIGHT_STEP
from alpa_meta.inter_op.layer_runs import Links, Potential
from alpa_meta.inter_op.least_bytes import ByNode, LeastBytes
from alpa_meta.intra_op.memory_limit import solve
from alpa_meta.options import Options
from alpa_meta.types import Fields, Floats

if TYPE_CHECKING:
    from alpa_meta.inter_op.mesh_problem import MeshProblem

# Beside none. Two, found by halving the hull, left GPT-39B on 64 V100 a gap of 8.3 %, three one of
# 5.9 %.
MAX_PRICES = 3
# Kinds of recomputation that are solved for: what others take beside the last of these is counted
# at its least. With none solved for, GPT-39B's gap is 8 %.
SOLVED_KINDS = 2


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
        self._potential: dict[int, Potential] = {}  # by class, the last one
        self._tables: dict[tuple[str, int], Floats] = {}  # seconds, by kind and samples
        self._bytes = LeastBytes(problem.costs)
        priced = problem.costs.selection.costs
        stated = priced.model.program is not None  # whose launches are not in the seconds here
        self._launch = 0.0 if stated else priced.model.device(priced.host_group).launch_latency

    def all_ways(self, number: int) -> LayerFloor:
        """Return a floor of a class that holds for any microbatch: per sample as in the largest,
        since what runs for fewer runs for their multiples."""
        layer, size = self.layers[number], self.problem.sizes.index(self._sizes[-1])
        seconds = self.problem.costs.seconds_of("least").tables[size]
        problem = self.problem.costs.layer_problem(layer, seconds)
        found = solve(problem, self.options, bound_only=True)
        each = (found.lower_bound or 0.0) / self.batch
        above = {
            kind: self.problem.costs.least_again(layer, kind, size, "least") for kind in self.kinds
        }
        return self._floor(layer, (PricedFloor(seconds=Affine(0.0, each)),), 0.0, above)

    def exact(self, number: int, samples: int) -> tuple[LayerFloor, ...]:
        """Return the floors of a class for microbatches of so many samples, none where there are
        no ways."""
        if (number, samples) not in self._known:
            self._known[number, samples] = self._exact(number, samples)
        return self._known[number, samples]

    def forget_seconds(self) -> None:
        """Free the seconds by kind and samples that floors were solved with; what is asked for
        later makes its own again."""
        self._tables.clear()

    def _exact(self, number: int, samples: int) -> tuple[LayerFloor, ...]:
        layer, often = self.layers[number], self.often[number]
        at_size = any(one.samples == samples for one in self._sizes)
        prices = self._prices(number, samples, at_size) if self.tight and often else []
        kinds = self.kinds[:SOLVED_KINDS] or ("least",)
        parts = PARTS if often else PARTS[:1]
        problems = [*parts, *(["light_step"] if prices else [])]
        known: list[Known] = []
        least = LeastOfKinds(
            {kind: self._ways(number, samples, kind, problems, known) for kind in kinds},
            prices,
            parts,
            self.options,
            bare=at_size and len(self.kinds) > len(kinds),
            start=self._potential.get(number),
        )
        self._potential[number] = least.potential
        if not least.possible:
            return ()
        by_kind, num_sums, others = least.by_kind, least.num_sums, least.others
        again = min((self._again(layer, kind) for kind in self._unsolved), default=math.inf)
        least_of_all = by_kind.min(axis=0)
        least_of_all[:num_sums] = np.minimum(least_of_all[:num_sums], others + again)
        step, *light = least_of_all.tolist()
        # beside each of what is said of the sums of seconds
        above = (by_kind - least_of_all)[:, :num_sums].min(axis=1).tolist()
        by_name = dict(zip(kinds, above, strict=True))
        beside = float((others - least_of_all[:num_sums]).min())
        by_name |= {kind: beside + self._again(layer, kind) for kind in self._unsolved}
        priced = [PricedFloor(step_seconds=max(step, 0.0))]
        for price, one in zip(prices, light, strict=False):
            priced.append(
                PricedFloor(price=price, step_share=LIGHT_STEP, step_seconds=max(one, 0.0))
            )
        floor = self._floor(layer, tuple(priced), least.fewest, by_name, samples)
        least_parts = zip(parts, light[len(prices) :], strict=True)
        of_parts: Fields = {
            name: Affine(0.0, max(one / self.batch, getattr(floor, name).each))
            for name, one in least_parts
        }
        of_run: Fields = {"follow_seconds": least.more, "run_seconds": least.less}
        return (evolve(floor, **of_parts, **of_run),)

    def _floor(
        self,
        layer: int,
        priced: tuple[PricedFloor, ...],
        state: float,
        above: Mapping[str, float],
        samples: int | None = None,
    ) -> LayerFloor:
        """Return the floor of a layer; `above`: by kind, how much more than `priced` it takes per
        step at least. `samples` of a microbatch; None: any, without temporaries."""
        costs, last = self.problem.costs, self.problem.sizes.index(self._sizes[-1])
        least = costs.least(layer, last)
        again = [max(above[kind], 0.0) / self.batch for kind in self.kinds]

        def column(*names: str) -> Affine:
            return Affine(0.0, sum(least[name] for name in names) / self.batch)

        return LayerFloor(
            seconds=column("forward", "backward"),
            forward=column("forward"),
            forward_and_input=column("forward", "backward_input"),
            backward=column("backward"),
            step_seconds=least["update"],
            state_bytes=state,
            priced=priced,
            kept=tuple(
                KeptFloor(
                    seconds=Affine(0.0, more),
                    activation_bytes=self._line(functools.partial(self._bytes.kept, layer, kind)),
                    transient_bytes=self._temporaries(layer, kind, samples) if samples else NOTHING,
                    split_seconds=Affine(0.0, costs.least_split(layer, kind, last) / self.batch),
                    delayed_bytes=self._line(functools.partial(self._bytes.delayed, layer, kind)),
                    waiting_bytes=self._line(functools.partial(self._bytes.waiting, layer, kind)),
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

    def _temporaries(self, layer: int, kind: str, samples: int) -> Affine:
        """Return what a layer works with at least with microbatches of so many samples.

        The most at a time grows ever faster with samples, and rows take straight lines between
        sizes: below all of them is the steepest line from a size to the largest, and that through
        nothing and a size.
        """
        last = self._sizes[-1]
        values = [
            (one.samples, self._bytes.transient(layer, kind, self.problem.sizes.index(one)))
            for one in self._sizes
        ]
        most = values[-1][1]
        if samples >= last.samples:
            return Affine(most)
        through = min(value / size for size, value in values) * samples
        slopes = [(most - value) / (last.samples - size) for size, value in values[:-1]]
        steepest = most - max(slopes) * (last.samples - samples) if slopes else 0.0
        return Affine(max(through, steepest, 0.0))

    def _prices(self, number: int, samples: int, at_size: bool) -> list[float]:
        """Return prices of bytes at which two rows of a class tie, of those that are the best at
        some price with microbatches of so many samples: the prices that save most."""
        saved = self._ties(number, samples, at_size)
        return sorted({price for _, price in sorted(saved)[-MAX_PRICES:]})

    def _ties(self, number: int, samples: int, at_size: bool) -> list[tuple[float, float]]:
        """Return the bytes that each price saves at which two rows tie, and the price."""
        count, layer = self.batch // samples, self.layers[number]
        kept = {kind: self._kept(layer, kind, samples) for kind in self.kinds if at_size}

        def more(row: LayerRow) -> float:
            """Return the bytes of state, and of activations beyond the least of the kind."""
            if row.recomputation not in kept:
                return row.state_bytes
            least = kept[row.recomputation]
            return row.state_bytes + max(row.activation_bytes.value(samples) - least, 0.0)

        points = [
            (
                count * sum(line.value(samples) for line in _lines(row)) + row.step_seconds,
                more(row),
            )
            for row in self.rows[number]
            if samples % row.batch_split == 0
        ]
        found: list[tuple[float, float]] = []
        here = min(points, default=(0.0, 0.0))
        while True:
            ties = [((p[0] - here[0]) / (here[1] - p[1]), p) for p in points if p[1] < here[1]]
            if not ties:
                return found
            before, (price, here) = here, min(ties)
            found.append((before[1] - here[1], price))

    def _ways(
        self, number: int, samples: int, kind: str, parts: Sequence[str], known: list[Known]
    ) -> Ways:
        """Return the ways to run a layer of a class, that recomputes as `kind` says, with
        microbatches of so many samples; what is solved of them goes into `known`."""
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
        names = ("state", "gradients") if samples < self.batch else ("state",)
        state = problem.costs.layer_bytes(layer, names)
        held = state
        if any(one.samples == samples for one in self._sizes):
            kept, whole = self._bytes.kept_by_node(layer, kind, self._place(samples))
            both = dict(state[0])
            for node, bytes in kept.items():
                both[node] = both[node] + bytes if node in both else bytes
            held = both, state[1] + whole - self._kept(layer, kind, samples)

        def by_strategy(bytes: ByNode) -> tuple[Floats, float]:
            """Return the bytes by the problem's strategies, and those that it does not decide."""
            left, counts = dict(bytes[0]), alone.num_strategies.tolist()
            own = [left.pop(n, np.zeros(k)) for n, k in zip(numbers, counts, strict=True)]
            return np.concatenate([np.zeros(0), *own]), bytes[1] + sum(
                float(one.min()) for one in left.values()
            )

        return Ways(
            self._splitting(alone, samples),
            {
                part: self._splitting(
                    problem.costs.layer_problem(layer, table, part, kind), samples
                )
                for part in parts
            },
            *by_strategy(state),
            *by_strategy(held),
            self._links(number, numbers, table, kind),
            known,
        )

    @property
    def _unsolved(self) -> Sequence[str]:
        """The kinds of recomputation that are not solved for."""
        return self.kinds[SOLVED_KINDS:]

    def _again(self, layer: int, kind: str) -> float:
        """Return the seconds per step that a kind takes at least more than the last solved one."""
        last = self.problem.sizes.index(self._sizes[-1])
        return self.problem.costs.least_again(layer, kind, last, self.kinds[SOLVED_KINDS - 1])

    def _place(self, samples: int) -> int:
        """Return the place of the size of so many samples."""
        return next(k for k, one in enumerate(self.problem.sizes) if one.samples == samples)

    def _kept(self, layer: int, kind: str, samples: int) -> float:
        """Return what is counted of a microbatch of one of the sizes in any way of a kind."""
        line = self._line(functools.partial(self._bytes.kept, layer, kind))
        return max(line.value(samples), self._bytes.kept(layer, kind, self._place(samples)))

    def _splitting(self, alone: ShardingProblem, samples: int) -> ShardingProblem:
        """Return the problem without strategies that split the batch into parts that do not divide
        the samples."""
        splits = [self.problem.splits[int(name)] for name in alone.node_names]
        wrong = samples % np.concatenate([np.ones(0, np.int64), *splits]) != 0
        return evolve(alone, node_cost=np.where(wrong, math.inf, alone.node_cost))

    def _links(self, number: int, nodes: Sequence[int], table: Floats, kind: str) -> Links:
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

    def _at(self, costs: Sequence[Floats], samples: int) -> Floats:
        """Return seconds per step with microbatches of so many samples from those at each size: the
        least on the lines of all rows that may be."""
        sizes, count = self._sizes, self.batch // samples
        found: list[Floats] = []
        ends = set()
        for k in {int(x) for one in self.problem.splits for x in one if samples % int(x) == 0}:
            own = [n for n, one in enumerate(sizes) if one.samples % k == 0]
            if len(own) > 1:
                ends.add((own[0], own[-1]))
            else:  # rows through one size take as long per sample at any other
                found += [costs[own[0]]] if own else costs
        for n, m in sorted(ends):
            last = sizes[m]
            with np.errstate(invalid="ignore"):
                slope = (costs[n] - costs[m]) / (sizes[n].count - last.count)
                line = costs[m] + slope * (count - last.count)
                # Rows whose line would fall with B stay at their value at the smaller size.
                line = np.where(slope < 0, np.minimum(line, costs[n]), line)
                line = np.minimum(line, self._led_to(costs, samples))
            if count < last.count:
                line = np.maximum(line, 0.0)
            found.append(np.where(np.isfinite(line), line, costs[n]))
        return np.asarray(np.min(found, axis=0))

    def _led_to(self, costs: Sequence[Floats], samples: int) -> Floats:
        """Return the seconds per step that a kernel takes at least with so many samples, by those
        at the sizes of the menu: inf where they say nothing.

        Its seconds grow with samples, and from size to size not less than before, nor than those
        from its launch to its seconds at a size above: the most of what follows from the sizes
        above and from the one below.
        """
        sizes, count = self._sizes, self.batch // samples
        below = [n for n, one in enumerate(sizes) if one.samples < samples]
        above = [n for n, one in enumerate(sizes) if one.samples >= samples]
        if not above:
            return np.full_like(costs[-1], math.inf)
        first, here = costs[above[0]], sizes[above[0]].count
        if sizes[above[0]].samples == samples:
            return np.where(np.isfinite(first), first, math.inf)

        def fixed(n: int) -> Floats:
            """Return what a microbatch takes without samples on the line through another size."""
            with np.errstate(invalid="ignore"):
                each = (first - costs[n]) / (here - sizes[n].count)
            return np.maximum(np.where(np.isfinite(each), each, 0.0), 0.0)

        rise = fixed(above[1]) if len(above) > 1 else np.zeros_like(first)
        if below:  # collectives grow in straight lines; a kernel's launch is paid for any samples
            rise = np.maximum(rise, np.minimum(fixed(below[-1]), self._launch))
        found = [first + rise * (count - here)]
        if below:
            found.append(costs[below[-1]] * (count / sizes[below[-1]].count))
        most = np.max([np.where(np.isfinite(one), one, -math.inf) for one in found], axis=0)
        return np.where(np.isfinite(most), most, math.inf)
