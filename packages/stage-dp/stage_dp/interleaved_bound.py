"""Lower bounds of interleaved pipelines over p equal meshes that run v stages (chunks) each.

Stage s of n = p v runs on mesh s mod p: chunk c of mesh j is stage c p + j. Of B microbatches of a
layer row, let f be the seconds forward, t those forward and back, u those of the step, s and a the
bytes of state and activations, M those of a device. Before its first forward of chunk c, mesh j has
run at most g = min(p, B) forwards of each chunk before, and microbatch 0 has passed all stages
before; the same holds for backwards at the end. With f_jc of all layers of a chunk and t_j, u_j of
a mesh

    step >= B t_j + u_j + sum over i < j of f_ic + sum over chunks d < c of (sum_i f_id - g f_jd)
    step >= the same with f + b in place of f, without u_j

and d_jc more, once and twice, where d_jc are the seconds of the boundaries before chunk c of mesh
j. Mesh j holds at least k_j microbatches of each chunk. The mean over c, with weights w_j >= 0 of
the meshes, 1 in all, and prices l_j >= 0 of bytes, is a sum over layers, each at its best mesh and
row:

    w_j (B t + u + l_j (s + k_j a)) + f sum over i > j of w_i / v + t min(0, 1 - g w_j) (v - 1) / v

and the means of w_j d_jc, less M sum w_j l_j. That for the last c, which is better for few
microbatches, has

    f min(sum over i > j of w_i, max(0, 1 - g w_j)) + t min(0, 1 - g w_j)

in place of the last two terms.                                       -> _priced()

Layers are whole: in a step of T seconds mesh j has room for at most min over l of
floor((T + l M) / (least B t + u + l (s + k_j a))) of them.                     -> whole_layers()
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from stage_dp.cell_bounds import RowArrays, hull_prices
from stage_dp.interleaved_order import interleaved_order, shorter
from stage_dp.interleaved_program import Layers, least_step
from stage_dp.joint_sweep import NEVER
from stage_dp.menu_table import Array, Index

# Times that weights are evened out, of which the best is taken: GPT-1.3B on 4 V100 has the same
# bound with 2 and with 12.
EVENED = 5
HALVED = 16  # times that the step time is halved in: to some 1e-4 of it
# Layers of rare classes that are placed; of more they count as seconds on the mean. With 1 the gap
# of GPT-1.3B is 4.90 % instead of 4.86 %, with 7 the same.
MAX_RARE = 4

Disjoint = tuple[Index, Index, Index]


def in_flight_least(num_meshes: int, count: int, mesh: int) -> int:
    """Return the microbatches in flight of that chunk of a mesh that holds the fewest."""
    return min(count, num_meshes, 2 * (num_meshes - mesh) - 1)


class InterleavedBounds:
    """Bounds of the pipelines on meshes like the one at `position` of `rows`."""

    def __init__(self, rows: RowArrays, position: int, layers: Sequence[int], count: int) -> None:
        self.count = count
        self._whole: dict[int, tuple[float, Array, Array]] = {}  # by number of meshes
        own = [i for i, c in enumerate(rows.classes) if c in set(layers)]
        found = Counter(layers)
        self.number = np.array([float(found[rows.classes[i]]) for i in own])
        seconds, step = rows.seconds[position, own], rows.step[position, own]
        finite = np.isfinite(seconds)
        self.possible = bool(finite.any(axis=1).all())
        # [classes, rows], what there is no row of never pays
        self.seconds = np.where(finite, seconds, NEVER)
        # Every mesh runs some layer, whose temporaries are in memory besides, and those that run
        # layers of the most frequent class the temporaries of these.
        temporaries = rows.transient[position, own].min(axis=1)
        self.main = int(np.argmax(self.number))
        memory, least = float(rows.memory[position]), float(temporaries.min())
        self.memory = memory - (least if math.isfinite(least) else 0.0)
        of_main = float(temporaries[self.main])
        self.taken = of_main - least if math.isfinite(of_main) else 0.0
        self.step = np.where(finite, step, 0.0)
        self.state = np.where(finite, rows.state[position, own], 0.0)
        self.activation = np.where(finite, rows.activation[position, own], 0.0)
        self.least_bytes = (rows.state + rows.activation)[position, own].min(axis=1)
        self.forward = rows.parts[position, own, 0]
        self.backward = rows.parts[position, own, 2]
        self.work = count * self.seconds + self.step
        self.least = self.work.min(axis=1)
        self.place = [own.index(rows.classes.index(c)) for c in layers]
        in_a_row = Counter(a for a, b in itertools.pairwise(self.place) if a == b)
        together = np.array([in_a_row[c] == n - 1 for c, n in enumerate(self.number)])
        self.follow = np.where(together, rows.raised[:, position, own], 0.0)  # [2, classes]

    def of_layers(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the least B t + u and the least bytes of each layer."""
        return tuple(self.least[self.place].tolist()), tuple(self.least_bytes[self.place].tolist())

    def mean(self, num: int) -> float:
        """Return the mean work of `num` meshes without memory; inf where there are no rows."""
        return float((self.number * self.least).sum() / num) if self.possible else math.inf

    def whole_layers(self, num: int, target: float = math.inf) -> float:
        """Return the bound on the longest work of the meshes, each with whole layers within its
        memory, up to `target`."""
        if num not in self._whole:
            found = self._whole_layers(num, target)
            if found[0] >= target < math.inf:
                return target
            self._whole[num] = found
        return self._whole[num][0]

    def with_idle_time(self, num: int, chunks: int, crossing: Sequence[float]) -> float:
        """Return the bound of weights and prices by which the meshes are evened out. `crossing`
        [meshes]: seconds one way from each to the next at least, from the last to the first."""
        self.whole_layers(num)
        _, price, cost = self._whole[num]
        main = self.main
        whole, forward = float(self.seconds[main].min()), float(self.forward[main])
        free = np.full(num, self.least[main]), np.zeros(num)
        return max(
            self._evened(num, chunks, seconds, prices, wait, whole, crossing)
            for seconds, prices in (free, (cost, price))
            for wait in (forward, whole)
        )

    def by_program(
        self,
        num: int,
        chunks: Sequence[int],
        crossing: Sequence[float],
        whole: bool,
        known: float,
        most_runs: int,
    ) -> float:
        """Return the bound of the program, the least of any of these `chunks`; `known` where that
        is no more. It keeps all runs of schedules of up to `most_runs`. `whole`: with whole
        layers."""
        layers = Layers(
            seconds=self.seconds,
            step=self.step,
            state=self.state,
            activation=self.activation,
            forward=self.forward,
            backward=self.backward,
            number=self.number,
            memory=self.memory,
            first=self.place[0],
            last=self.place[-1],
            follow=self.follow / self.count,
        )
        bound = math.inf
        for v in sorted(chunks, reverse=True):  # more chunks have the lower bound
            every_run = 2 * num * v * self.count <= most_runs
            shown = self.count if every_run else shorter(self.count, num)
            runs = interleaved_order(num, v, shown)
            count = None if every_run else self.count
            bound = min(bound, least_step(layers, runs, crossing, whole, count))
            if bound <= known:
                return known
        return bound

    def _bytes(self, num: int) -> Array:
        """Return the bytes of rows on each mesh: [meshes, classes, rows]."""
        held = np.array([in_flight_least(num, self.count, j) for j in range(num)], dtype=float)
        return np.asarray(self.state + held[:, None, None] * self.activation)

    @cached_property
    def _by_held(self) -> tuple[Array, Array]:
        """Return prices of bytes by microbatches in flight, [held, prices] from one on, and what a
        layer takes where bytes have that price, [held, prices, classes]."""
        most = min(self.count, max(1, len(self.place) // 2))
        held = np.arange(1.0, most + 1)
        bytes = self.state + held[:, None, None] * self.activation
        finite = np.where(self.work < NEVER, self.work, np.inf)
        ties = hull_prices(finite, bytes).reshape(most, -1)
        ties = ties[:, ties.any(axis=0)]
        prices = np.concatenate([np.zeros((most, 1)), ties], axis=1)
        return prices, (self.work + prices[:, :, None, None] * bytes[:, None]).min(axis=3)

    def _whole_layers(self, num: int, target: float) -> tuple[float, Array, Array]:
        """Return the bound up to `target`, and of each mesh the price that binds it and what a
        layer of the most frequent class takes at that price."""
        main = self.main
        held = [in_flight_least(num, self.count, j) - 1 for j in range(num)]
        prices, cost = (values[held] for values in self._by_held)
        room, taken = prices * self.memory, prices * self.taken
        rare = [c for c in range(len(self.number)) if c != main for _ in range(int(self.number[c]))]
        rare = rare if len(rare) <= MAX_RARE else []
        # [sets of rare layers, meshes, prices]
        sets = np.array(list(itertools.product((0.0, 1.0), repeat=len(rare))))
        own = np.tensordot(sets, cost[:, :, rare].transpose(2, 0, 1), axes=1)
        each = np.maximum(cost[:, :, main], 1e-300)
        disjoint = _disjoint(len(rare))

        def enough(step: float) -> bool:
            most = ((step + room - own) / each).min(axis=2)
            some = ((step + room - taken - own) / each).min(axis=2)
            whole = np.maximum(np.floor(some * (1 + 1e-12) + 1e-9), 0.0)
            fits = np.where(most < -1e-9, -np.inf, whole)
            return bool(_most_placed(fits, disjoint) >= self.number[main])

        low, high = min(self.mean(num), target), target
        if math.isinf(target):
            high = max(low, float((self.number * cost[0, -1]).sum()))
            while not enough(high) and high < NEVER:
                low, high = high, 4 * high
        elif not enough(target):
            low = target
        if low < high and not enough(low):
            for _ in range(HALVED):
                middle = (low + high) / 2
                low, high = (low, middle) if enough(middle) else (middle, high)
        at: Index = ((low + room) / each).argmin(axis=1)
        mesh = np.arange(num)
        return (low if low < NEVER / 16 else math.inf), prices[mesh, at], each[mesh, at]

    def _evened(
        self,
        num: int,
        chunks: int,
        cost: Array,
        price: Array,
        wait: float,
        whole: float,
        crossing: Sequence[float],
    ) -> float:
        """Return the best bound of some weights: those with which a layer of the most frequent
        class, of `cost` on each mesh, is no cheaper on another mesh."""
        bound = 0.0
        share = 1 / np.maximum(cost, 1e-300)
        for _ in range(EVENED):
            share = share / share.sum()
            bound = max(bound, self._priced(num, chunks, share, price, crossing))
            waits, more = self._idle(num, chunks, share)
            level = (share * cost + wait * waits + whole * more).mean()
            after = np.maximum(level - wait * waits - whole * more, 0.0) / np.maximum(cost, 1e-300)
            if after.sum() <= 0:
                break
            share = (share + after / after.sum()) / 2
        return bound

    def _idle(self, num: int, chunks: int, share: Array) -> tuple[Array, Array]:
        """Return for each mesh how often its layers' seconds forward count for what others wait,
        and how often less their seconds count: [meshes] each."""
        after = np.cumsum(share[::-1])[::-1] - share
        ahead = 1 - min(num, self.count) * share  # of a chunk before the one that is waited for
        mean = after / chunks, np.minimum(ahead * (chunks - 1) / chunks, 0.0)
        last = np.minimum(after, np.maximum(ahead, 0.0)), np.minimum(ahead, 0.0)
        return last if (last[0] + last[1]).sum() > (mean[0] + mean[1]).sum() else mean

    def _priced(
        self, num: int, chunks: int, share: Array, price: Array, crossing: Sequence[float]
    ) -> float:
        """Return the bound for weights w and prices l of `num` meshes."""
        waits, more = self._idle(num, chunks, share)
        weight = share[:, None, None]
        one = (weight * self.count + more[:, None, None]) * self.seconds
        work = one + weight * (self.step + price[:, None, None] * self._bytes(num))
        there = work.min(axis=2) + waits[:, None] * self.forward  # [meshes, classes]
        back = (work + waits[:, None, None] * self.seconds - weight * self.step).min(axis=2)
        way = np.cumsum([0.0, *crossing[:-1]]) + (chunks - 1) / 2 * sum(crossing)
        least = max(
            float((self.number * each.min(axis=0)).sum()) + ways * float((share * way).sum())
            for ways, each in ((1, there), (2, back))
        )
        return least - float((share * price).sum() * self.memory)


def _most_placed(fits: Array, sets: Disjoint) -> float:
    """Return the most layers that meshes run beside rare ones, each of which is on one mesh.

    `fits` [sets of rare layers, meshes]: the layers that fit beside a set, -inf if that does not.
    """
    if np.isneginf(fits[0]).any():
        return -math.inf
    before, own, starts = sets
    more, rare = fits - fits[0], len(fits).bit_length() - 1
    # Of as many meshes as there are rare layers, one is left for each set where it costs least.
    if not rare:
        return float(fits.sum())
    if rare < more.shape[1]:
        near = np.argpartition(-more[1:], rare - 1, axis=1)[:, :rare]
        more = more[:, np.unique(near)]
    best = np.where(np.arange(len(fits)) == 0, 0.0, -np.inf)
    for mesh in range(more.shape[1]):
        best = np.maximum.reduceat(best[before] + more[own, mesh], starts)
    return float(fits[0].sum() + best[-1])


def _disjoint(num: int) -> Disjoint:
    """Return all pairs of sets of `num` things that share none, by their union, and where the pairs
    of each union start."""
    pairs = sorted((a | b, a, b) for a in range(1 << num) for b in range(1 << num) if not a & b)
    union, before, own = np.array(pairs).T
    return before, own, np.searchsorted(union, np.arange(1 << num))
