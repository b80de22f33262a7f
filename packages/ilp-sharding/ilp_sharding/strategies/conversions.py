"""Cheapest ways to change a tensor's sharding inside one mesh.

A sharding spec is a state; one collective (or a free local step) leads to another state:

    slice           append a mesh axis to a dim that was whole on it        free
    mask            make a whole value a sum of itself and zeros            free
    all-gather      drop the minor axis of a dim                            output bytes
    all-to-all      move the minor axis of one dim to the end of another    local bytes
    all-reduce      finish a sum over partial axes                          local bytes
    reduce-scatter  finish a sum over one axis, keeping a part of one dim   input bytes

Shortest paths (Bellman-Ford, from all specs asked for at once) over these states give the least
seconds between two specs and the collectives that attain them. A state has few neighbours, so this
is quick where all pairs would not be: of a tensor of 4 dims on a mesh of 4 axes there are 2,424
states. -> implemented in `ConversionTable`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
from attrs import field, frozen

from alpa_interchange import LogicalMesh, ShardingSpec
from ilp_sharding.strategies.divisibility import divisibility_of

FEW_STATES = 100  # of a tensor, up to which the paths from all cost little more than from one
FREE = ("slice", "mask")
"""The steps that send nothing."""

CollectiveSeconds = Callable[[str, float, tuple[str, ...]], float]
"""(kind, bytes, mesh axes) -> seconds; bytes are those of the larger side of the collective."""


@frozen
class ConversionStep:
    """One step of a conversion. `dim` is gathered, scattered or sliced; all-to-all moves to
    `to_dim`."""

    kind: str  # "slice", "mask", "all-gather", "all-to-all", "all-reduce", "reduce-scatter"
    axes: tuple[str, ...]
    dim: int = -1
    to_dim: int = -1


def sharding_specs(shape: Sequence[int], mesh: LogicalMesh) -> tuple[ShardingSpec, ...]:
    """Return every spec that divides `shape` evenly over `mesh`, the replicated one first.

    Axes of size one are never used. Several axes on one dim keep the mesh's axis order.
    """
    names = [axis.name for axis in mesh.axes if axis.size > 1]
    specs = []
    for homes in itertools.product(range(-1, len(shape)), repeat=len(names)):
        dims: list[tuple[str, ...]] = [
            tuple(name for name, home in zip(names, homes, strict=True) if home == dim)
            for dim in range(len(shape))
        ]
        if all(size % mesh.size(axes) == 0 for size, axes in zip(shape, dims, strict=True)):
            specs.append(ShardingSpec(tuple(dims)))
    return tuple(specs)


class ConversionTable:
    """Least seconds and collectives between all sharding specs of one tensor on one mesh.

    `shape` [dims] and `bytes` (of the whole tensor) fix what may be split and what moving it costs.
    """

    def __init__(
        self,
        shape: Sequence[int],
        bytes: float,
        mesh: LogicalMesh,
        seconds: CollectiveSeconds,
    ) -> None:
        self._mesh = mesh
        alike = divisibility_of(mesh)
        self._graph = _graph(alike.shape(shape), alike.mesh)
        weights = np.array(
            [
                _step_seconds(step, bytes / mesh.size(sharded), mesh, seconds)
                for step, sharded in self._graph.priced
            ]
        )
        self._moves = [
            (starts, stops, weights[which]) for starts, stops, which in self._graph.moves
        ]
        self._paths: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._weights = weights

    def _number(self, spec: ShardingSpec) -> int:
        """Return the number of a state; ValueError if no tensor of this shape has this spec."""
        number = self._graph.index.get(spec)
        if number is None:
            raise ValueError(
                "a spec must have one entry per dim, name axes of the mesh "
                f"{self._mesh.axis_names} once each, none of size one, and divide the dims "
                f"evenly; got {spec}"
            )
        return number

    def _from(self, starts: Collection[int]) -> None:
        """Find the cheapest paths from these states: [states] seconds and last state before."""
        if all(start in self._paths for start in starts):
            return
        count = len(self._graph.index)
        wanted = range(count) if count <= FEW_STATES else dict.fromkeys(starts)
        missing = np.array([start for start in wanted if start not in self._paths])
        rows = np.arange(len(missing))
        cost = np.full((len(self._graph.index), len(missing)), np.inf)
        before = np.full(cost.shape, -1)
        cost[missing, rows] = 0.0
        changed = True
        while changed:
            changed = False
            for sources, targets, weights in self._moves:
                through = cost[sources] + weights[:, None]
                better = through < cost[targets]
                if better.any():
                    changed = True
                    cost[targets] = np.where(better, through, cost[targets])
                    before[targets] = np.where(better, sources[:, None], before[targets])
        for row, start in enumerate(missing.tolist()):
            self._paths[start] = cost[:, row].copy(), before[:, row].copy()

    def seconds(self, source: ShardingSpec, target: ShardingSpec) -> float:
        """Return the least seconds from `source` to `target`."""
        return float(self.matrix([source], [target])[0, 0])

    def matrix(
        self, sources: Sequence[ShardingSpec], targets: Sequence[ShardingSpec]
    ) -> np.ndarray:
        """Return [sources, targets] least seconds."""
        return self.at(self.places(sources), self.places(targets))

    def places(self, specs: Sequence[ShardingSpec]) -> np.ndarray:
        """Return [specs] numbers of states, which `at` takes."""
        return np.array(list(map(self._number, specs)), dtype=np.int64)

    def at(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return [sources, targets] least seconds between states by number."""
        if len(self._graph.index) <= FEW_STATES:
            least: np.ndarray = self._least[sources[:, None], targets]
            return least
        distinct, rows = np.unique(sources, return_inverse=True)
        self._from(distinct.tolist())
        costs = np.array([self._paths[row][0] for row in distinct.tolist()])
        found: np.ndarray = costs.reshape(len(distinct), -1)[rows[:, None], targets]
        return found

    @functools.cached_property
    def _least(self) -> np.ndarray:
        """[states, states] least seconds: of one step, then of twice as many while that helps."""
        count = len(self._graph.index)
        least = np.full((count, count), np.inf)
        np.fill_diagonal(least, 0.0)
        for sources, targets, which in self._graph.moves:
            least[sources, targets] = self._weights[which]
        while True:
            through = np.min(least[:, :, None] + least[None], axis=1)
            if np.array_equal(through, least):
                return least
            least = through

    def steps(self, source: ShardingSpec, target: ShardingSpec) -> tuple[ConversionStep, ...]:
        """Return the steps of a cheapest conversion."""
        start, here = self._number(source), self._number(target)
        self._from([start])
        _, before = self._paths[start]
        path = []
        while here != start:
            path.append(self._graph.steps[int(before[here]), here])
            here = int(before[here])
        return tuple(path[::-1])


@frozen(eq=False)
class _Graph:
    """The states of tensors that the same axes divide, and the steps between them.

    `moves` are arrays of (starts, stops, places in `priced`) that reach no state twice; `priced`
    are the steps that differ in what they cost, each with the axes that a tensor is sharded over
    before it.
    """

    index: Mapping[ShardingSpec, int]
    steps: Mapping[tuple[int, int], ConversionStep]
    moves: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]
    priced: Sequence[tuple[ConversionStep, tuple[str, ...]]]


@functools.lru_cache(maxsize=4096)
def _graph(shape: tuple[int, ...], mesh: LogicalMesh) -> _Graph:
    index = {state: number for number, state in enumerate(_states(shape, mesh))}
    steps: dict[tuple[int, int], ConversionStep] = {}
    places: dict[tuple[str, tuple[str, ...], tuple[str, ...]], int] = {}
    priced: list[tuple[ConversionStep, tuple[str, ...]]] = []
    groups: list[list[tuple[int, int, int]]] = []
    arrivals: dict[int, int] = {}
    for state, start in index.items():
        sharded = tuple(sorted(axis for dim in state.dims for axis in dim))
        for step, reached in _moves(state, mesh):
            stop = index.get(reached)
            if stop is None:
                continue
            steps[start, stop] = step
            place = places.setdefault((step.kind, step.axes, sharded), len(places))
            if place == len(priced):
                priced.append((step, sharded))
            number = arrivals.get(stop, 0)
            arrivals[stop] = number + 1
            if number == len(groups):
                groups.append([])
            groups[number].append((start, stop, place))
    moves = []
    for group in groups:
        starts, stops, which = zip(*group, strict=True)
        moves.append((np.array(starts), np.array(stops), np.array(which)))
    return _Graph(index, steps, moves, priced)


@frozen
class Conversions:
    """Conversion tables of one mesh, built on demand: one per divisibility pattern and size class.

    Tensors that the same axes divide in the same way, and whose bytes agree within a factor of
    four, share the paths; seconds are then exact for the bytes asked for.
    """

    mesh: LogicalMesh
    collective_seconds: CollectiveSeconds
    _tables: dict[tuple[object, ...], ConversionTable] = field(factory=dict, eq=False, repr=False)

    def table(self, shape: Sequence[int], bytes: float) -> ConversionTable:
        """Return the table for tensors like one of `shape` and `bytes`."""
        nominal = nominal_bytes(bytes)
        key = (divisibility_of(self.mesh).shape(shape), nominal)
        if key not in self._tables:
            self._tables[key] = ConversionTable(shape, nominal, self.mesh, self.collective_seconds)
        return self._tables[key]

    def steps(
        self, shape: Sequence[int], bytes: float, source: ShardingSpec, target: ShardingSpec
    ) -> tuple[ConversionStep, ...]:
        """Return the collectives that turn `source` into `target`."""
        return () if source == target else self.table(shape, bytes).steps(source, target)

    def seconds(
        self, shape: Sequence[int], bytes: float, source: ShardingSpec, target: ShardingSpec
    ) -> float:
        """Return the seconds of those collectives for a tensor of `bytes`."""
        total = 0.0
        local = bytes / self.mesh.size(tuple(axis for dim in source.dims for axis in dim))
        for step in self.steps(shape, bytes, source, target):
            total += _step_seconds(step, local, self.mesh, self.collective_seconds)
            local = _local_after(step, local, self.mesh)
        return total

    def matrix(
        self,
        shape: Sequence[int],
        bytes: float,
        sources: Sequence[ShardingSpec],
        targets: Sequence[ShardingSpec],
    ) -> np.ndarray:
        """Return [sources, targets] seconds, scaled from the size class to `bytes`."""
        table = self.table(shape, bytes)
        nominal = nominal_bytes(bytes)
        return table.matrix(sources, targets) * (bytes / nominal if bytes else 0.0)


def nominal_bytes(bytes: float) -> float:
    """Return the bytes whose paths a tensor of `bytes` shares: a power of four."""
    return float(4.0 ** round(math.log(max(bytes, 1.0), 4)))


def _states(shape: tuple[int, ...], mesh: LogicalMesh) -> Iterator[ShardingSpec]:
    names = [axis.name for axis in mesh.axes if axis.size > 1]
    partial = -2  # a home of -1 leaves the axis unused
    for homes in itertools.product(range(-2, len(shape)), repeat=len(names)):
        groups = [
            [name for name, home in zip(names, homes, strict=True) if home == dim]
            for dim in range(len(shape))
        ]
        if any(size % mesh.size(tuple(g)) for size, g in zip(shape, groups, strict=True)):
            continue
        sums = tuple(name for name, home in zip(names, homes, strict=True) if home == partial)
        for orders in itertools.product(*(itertools.permutations(group) for group in groups)):
            yield ShardingSpec(tuple(orders), sums)


def _moves(state: ShardingSpec, mesh: LogicalMesh) -> Iterator[tuple[ConversionStep, ShardingSpec]]:
    dims, partial = state.dims, state.partial
    used = {axis for dim in dims for axis in dim} | set(partial)
    free = [axis.name for axis in mesh.axes if axis.size > 1 and axis.name not in used]

    def with_dim(dim: int, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        return dims[:dim] + (axes,) + dims[dim + 1 :]

    for axis in free:
        summed = tuple(sorted((*partial, axis), key=mesh.axis_names.index))
        yield ConversionStep("mask", (axis,)), ShardingSpec(dims, summed)
    for dim, axes in enumerate(dims):
        for axis in free:
            step = ConversionStep("slice", (axis,), dim)
            yield step, ShardingSpec(with_dim(dim, axes + (axis,)), partial)
        for axis in partial:
            left = tuple(name for name in partial if name != axis)
            step = ConversionStep("reduce-scatter", (axis,), dim)
            yield step, ShardingSpec(with_dim(dim, axes + (axis,)), left)
        if axes:
            shorter = with_dim(dim, axes[:-1])
            yield ConversionStep("all-gather", axes[-1:], dim), ShardingSpec(shorter, partial)
            for to_dim, to_axes in enumerate(dims):
                if to_dim != dim:
                    moved = shorter[:to_dim] + (to_axes + axes[-1:],) + shorter[to_dim + 1 :]
                    step = ConversionStep("all-to-all", axes[-1:], dim, to_dim)
                    yield step, ShardingSpec(moved, partial)
    for length in range(1, len(partial) + 1):
        for axes in itertools.combinations(partial, length):
            left = tuple(name for name in partial if name not in axes)
            yield ConversionStep("all-reduce", axes), ShardingSpec(dims, left)


def _step_seconds(
    step: ConversionStep, local: float, mesh: LogicalMesh, seconds: CollectiveSeconds
) -> float:
    if step.kind in FREE:
        return local * 1e-18  # free, but never preferred to doing nothing
    moved = local * mesh.size(step.axes) if step.kind == "all-gather" else local
    return seconds(step.kind, moved, step.axes)


def _local_after(step: ConversionStep, local: float, mesh: LogicalMesh) -> float:
    if step.kind == "all-gather":
        return local * mesh.size(step.axes)
    if step.kind in ("slice", "reduce-scatter"):
        return local / mesh.size(step.axes)
    return local
