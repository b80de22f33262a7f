"""Specs and strategies on meshes of one shape: what of them does not depend on links or bytes.

Whether axes divide a dim is all that its size decides, so sizes that the same axes divide share
everything here, and meshes whose axes divide alike all but numbers of devices (`divisibility`).
Equal tuples of specs or strategies have one number, by which all else is remembered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
from attrs import evolve, field, frozen

from alpa_interchange import LogicalMesh, MeshAxis, ShardingRule, ShardingSpec, Strategy
from alpa_meta.intra_op.hashed_tuple import HashedTuple
from alpa_meta.types import Floats, Ints, Remembered
from ilp_sharding.strategies import (
    Divisibility,
    completed_specs,
    divisibility_of,
    natural_strategies,
    shardable_factors,
    sharding_specs,
)

T = TypeVar("T")

Sum = tuple[int, int, tuple[str, ...]]
"""A sum that an operator completes: which result, over how many parts it is sharded, mesh axes."""


@frozen(eq=False)
class Columns:
    """The specs of each operand and result under every strategy of an operator."""

    operands: tuple[tuple[ShardingSpec, ...], ...]
    results: tuple[tuple[ShardingSpec, ...], ...]


Step = tuple[str, int, tuple[str, ...]]
"""A collective of a completion: its kind, by how much of the tensor it moves less, mesh axes."""


@frozen(eq=False)
class Repeated(Generic[T]):
    """What is counted at `places`, often the same: item k counts `distinct[which[k]]`."""

    places: Ints
    which: Ints
    distinct: tuple[T, ...]

    @classmethod
    def of(cls, items: Iterable[tuple[int, Sequence[T]]]) -> Repeated[T]:
        """Return what is counted, by place."""
        numbers: dict[T, int] = {}
        pairs = [
            (place, numbers.setdefault(one, len(numbers))) for place, some in items for one in some
        ]
        places, which = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return cls(places, which, tuple(numbers))

    def added_to(self, totals: Floats, values: Sequence[float]) -> None:
        """Add the `values` of what is distinct to the `totals` of the places, in order."""
        if values:
            np.add.at(totals, self.places, np.array(values)[self.which])


@frozen(eq=False)
class Completions:
    """The specs sums can be completed in, and the collectives of each possible (natural, final):
    `rows` and `columns` of the pairs, and what each of them takes."""

    finals: tuple[ShardingSpec, ...]
    rows: Ints
    columns: Ints
    steps: Repeated[Step]


@frozen(eq=False)
class _Known:
    """What is known of all meshes whose axes divide alike."""

    remembered: dict[Hashable, Remembered] = field(factory=dict)
    specs: dict[Hashable, ShardingSpec] = field(factory=dict)
    numbers: dict[Hashable, int] = field(factory=dict)
    values: list[Remembered] = field(factory=list)


@frozen(eq=False)
class Layouts:
    """Specs and strategies on a mesh, of which only the names and sizes of its axes matter."""

    mesh: LogicalMesh
    _alike: Divisibility = field(repr=False)
    _known: _Known = field(repr=False)  # of all meshes like this one
    _counted: dict[Hashable, Remembered] = field(factory=dict, repr=False)  # of this one

    def number(self, value: Hashable) -> int:
        """Return a number that is equal for equal values."""
        found = self._known.numbers.get(value)
        if found is None:
            found = self._known.numbers[value] = len(self._known.values)
            self._known.values.append(value)
        return found

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned when `key` was first asked for on any mesh whose axes divide
        alike."""
        found: T | None = self._known.remembered.get(key)
        if found is None:
            found = self._known.remembered[key] = make()
        return found

    def _once_here(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned when `key` was first asked for on this mesh."""
        found: T | None = self._counted.get(key)
        if found is None:
            found = self._counted[key] = make()
        return found

    def pattern(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes that stand for those of `shape`."""
        return self._alike.shape(shape)

    def like(self, rule: ShardingRule) -> ShardingRule:
        """Return a rule with the same strategies, equal for all rules alike."""
        return self._once_here(("like", rule), lambda: self._like(rule))

    def _like(self, rule: ShardingRule) -> ShardingRule:
        alike = self._alike

        def size(given: int) -> int:
            found = alike.size(given)
            return alike.mesh.num_devices + 1 if found == 1 < given else found  # undivided

        factors = tuple(evolve(factor, size=size(factor.size), halo=0) for factor in rule.factors)
        made = evolve(rule, factors=factors)
        return self._same(made)

    def spec(self, dims: tuple[tuple[str, ...], ...], partial: tuple[str, ...]) -> ShardingSpec:
        """Return the spec of these axes, made and checked once."""
        found = self._known.specs.get((dims, partial))
        if found is None:
            found = self._known.specs[dims, partial] = ShardingSpec(dims, partial)
        return found

    def specs(self, shape: Sequence[int]) -> tuple[ShardingSpec, ...]:
        """Return the sharding specs of tensors of `shape`."""
        pattern = self.pattern(shape)
        return self.once(
            ("specs", pattern), lambda: self.same_tuple(sharding_specs(pattern, self._alike.mesh))
        )

    def summed_specs(self, shape: Sequence[int]) -> tuple[ShardingSpec, ...]:
        """Return the sharding specs of tensors of `shape`, also of unreduced sums."""
        pattern = self.pattern(shape)
        names = [axis.name for axis in self.mesh.axes if axis.size > 1]
        return self.once(
            ("summed", pattern),
            lambda: self.same_tuple(
                ShardingSpec(spec.dims, left)
                for spec in self.specs(shape)
                for count in range(len(names) + 1)
                for left in itertools.combinations(names, count)
                if not any(axis in dim for dim in spec.dims for axis in left)
            ),
        )

    def strategies(self, rule: ShardingRule) -> tuple[Strategy, ...]:
        """Return all strategies of a rule, with sums left partial."""
        like = self.like(rule)
        return self.once(
            ("strategies", like),
            lambda: self.same_tuple(natural_strategies(like, self._alike.mesh)),
        )

    def axis_bits(self, number: int) -> Ints:
        """Return [choices] which mesh axes specs or strategies use, by their number: a bit each."""
        return self.once(
            ("axis bits", number), lambda: axis_bits(self._known.values[number], self.mesh)
        )

    def names(self, number: int) -> tuple[str, ...]:
        """Return specs or strategies, by their number, as text."""
        return self.once(("names", number), lambda: tuple(map(str, self._known.values[number])))

    def columns(self, number: int) -> Columns:
        """Return the specs of the operands and results of strategies, by their number."""

        def make() -> Columns:
            strategies = self._known.values[number]
            return Columns(
                tuple(
                    map(self.same_tuple, zip(*(one.operands for one in strategies), strict=True))
                ),
                tuple(map(self.same_tuple, zip(*(one.results for one in strategies), strict=True))),
            )

        return self.once(("columns", number), make)

    def same_tuple(self, of: Iterable[T]) -> tuple[T, ...]:
        """Return the tuple `of` specs or strategies, one object for equal ones."""
        return self._same(HashedTuple(of))

    def _same(self, value: T) -> T:
        """Return one object for all equal ones."""
        found: T = self._known.values[self.number(value)]
        return found

    def parts(self, number: int) -> Ints:
        """Return [specs] over how many devices each shards a tensor, of specs by their number."""
        return self._once_here(
            ("parts", number),
            lambda: np.array([self._parts(s) for s in self._known.values[number]]),
        )

    def _parts(self, spec: ShardingSpec) -> int:
        return self.mesh.size(tuple(axis for dim in spec.dims for axis in dim))

    def leaves_sums(self, number: int) -> bool:
        """Return whether some of these strategies leave a sum partial."""
        return self.once(
            ("leaves", number),
            lambda: any(spec.partial for one in self._known.values[number] for spec in one.results),
        )

    def shards(self, number: int) -> tuple[int, ...]:
        """Return over how many devices each strategy divides its operator."""
        return self._once_here(
            ("shards", number),
            lambda: tuple(
                self.mesh.size(tuple(a for _, axes in one.assignment for a in axes))
                for one in self._known.values[number]
            ),
        )

    def shard_counts(self, number: int) -> tuple[list[int], Ints]:
        """Return the different numbers of `shards`, and the place of each strategy's in them."""

        def make() -> tuple[list[int], Ints]:
            counts, places = np.unique(self.shards(number), return_inverse=True)
            return counts.tolist(), places

        return self._once_here(("counts", number), make)

    def own_sums(self, rule: ShardingRule, number: int) -> Repeated[Sum]:
        """Return, by strategy, the sums that an operator does not leave partial."""
        like = self.like(rule)
        return self._once_here(
            ("sums", like, number),
            lambda: Repeated.of(
                (place, tuple(self.own_sums_of(like, one)))
                for place, one in enumerate(self._known.values[number])
            ),
        )

    def own_sums_of(self, rule: ShardingRule, strategy: Strategy) -> Iterator[Sum]:
        """Yield the sums that an operator does not leave partial under one strategy."""
        reduced = [
            axis
            for name, axes in strategy.assignment
            if rule.factor(name).kind == "reduction"
            for axis in axes
        ]
        for number, result in enumerate(strategy.results):
            summed = tuple(axis for axis in reduced if axis not in result.partial)
            if summed:
                yield number, self._parts(result), summed

    def following(
        self, rule: ShardingRule, leader: int, number: int, passes: bool, leaves: bool
    ) -> tuple[Strategy, ...]:
        """Return the strategy under each spec, by their number, of the operand `leader`.

        Partial sums go through an equation that `passes` them on, and are completed before any
        other. One that `leaves` its own sums to be completed behind its region does so under every
        spec.
        """
        like = self.like(rule)

        def make() -> tuple[Strategy, ...]:
            specs = self._known.values[number]
            follower = _Follower(self, self._alike.mesh, like, leader, passes, leaves)
            found = {spec: follower.strategy(spec) for spec in dict.fromkeys(specs)}
            return self.same_tuple([found[spec] for spec in specs])

        return self.once(("following", like, leader, number, passes, leaves), make)

    def completions(self, number: int, shape: Sequence[int], allowed: bool) -> Completions:
        """Return how sums of `shape` whose natural specs have this number can be completed."""
        pattern = self.pattern(shape)
        return self._once_here(
            ("completions", number, pattern, allowed),
            lambda: self._completions(self._known.values[number], pattern, allowed),
        )

    def _completions(
        self, natural: Sequence[ShardingSpec], shape: tuple[int, ...], allowed: bool
    ) -> Completions:
        reachable = {
            spec: completed_specs(spec, shape, self._alike.mesh, allowed)
            for spec in dict.fromkeys(natural)
        }
        finals = tuple(dict.fromkeys(f for specs in reachable.values() for f in specs))
        position = {spec: number for number, spec in enumerate(finals)}
        pairs = [
            (row, position[final], tuple(self.completion_steps(spec, final)))
            for row, spec in enumerate(natural)
            for final in reachable[spec]
        ]
        rows, columns = np.array([pair[:2] for pair in pairs], dtype=np.int64).reshape(-1, 2).T
        steps = Repeated.of((place, pair[2]) for place, pair in enumerate(pairs))
        return Completions(self.same_tuple(finals), rows, columns, steps)

    def completion_steps(self, natural: ShardingSpec, final: ShardingSpec) -> Iterator[Step]:
        """Yield what completes partial sums, from one spec to another.

        Scattering comes first, because the rest then reduces less.
        """
        parts = self._parts(natural)
        scattered = []
        for before, after in zip(natural.dims, final.dims, strict=True):
            for axis in after[len(before) :]:
                yield "reduce-scatter", parts, (axis,)
                parts *= self.mesh.size((axis,))
                scattered.append(axis)
        left = tuple(a for a in natural.partial if a not in scattered and a not in final.partial)
        if left:
            yield "all-reduce", parts, left


def axis_bits(choices: Sequence[ShardingSpec | Strategy], mesh: LogicalMesh) -> Ints:
    """Return [choices] which mesh axes each uses: bit k for the k-th axis."""
    bit = {axis.name: 1 << number for number, axis in enumerate(mesh.axes)}

    def of(choice: ShardingSpec | Strategy) -> int:
        if isinstance(choice, ShardingSpec):
            return sum(bit[name] for name in choice.axes)
        names = {name for _, assigned in choice.assignment for name in assigned}
        for spec in (*choice.operands, *choice.results):
            names.update(spec.axes)
        return sum(bit[name] for name in names)

    return np.array([of(choice) for choice in choices], dtype=np.int64)


def layouts_of(mesh: LogicalMesh) -> Layouts:
    """Return the layouts of all meshes with axes of these names and sizes."""
    return _layouts(tuple((axis.name, axis.size) for axis in mesh.axes))


@functools.lru_cache(maxsize=64)  # a search has some tens of meshes
def _layouts(axes: tuple[tuple[str, int], ...]) -> Layouts:
    mesh = LogicalMesh(axes=tuple(MeshAxis(name=name, size=size) for name, size in axes))
    alike = divisibility_of(mesh)
    return Layouts(mesh, alike, _known_of(alike.mesh))


@functools.lru_cache(maxsize=64)
def _known_of(mesh: LogicalMesh) -> _Known:
    """Return what is known of all meshes that a small one stands for."""
    return _Known()


class _Follower:
    """What an equation does under each spec of the operand that it follows."""

    def __init__(
        self,
        layouts: Layouts,
        mesh: LogicalMesh,
        rule: ShardingRule,
        leader: int,
        passes: bool,
        leaves: bool,
    ) -> None:
        self.layouts, self.mesh, self.rule, self.passes = layouts, mesh, rule, passes
        shardable, factors = _shardable(rule), {factor.name: factor for factor in rule.factors}
        self._led: list[tuple[int, str, int]] = []  # dim of the leader, factor on it, size
        for number, dim in enumerate(rule.operands[leader]):
            if dim and dim[0] in shardable and all(dim[0] != name for _, name, _ in self._led):
                self._led.append((number, dim[0], factors[dim[0]].size))
        self._left = {
            factor.name
            for factor in rule.factors
            if leaves and factor.kind == "reduction" and factor.reduction == "add"
        }

    def strategy(self, spec: ShardingSpec) -> Strategy:
        """Return the strategy under one spec."""
        mesh = self.mesh
        assignment: dict[str, tuple[str, ...]] = {}
        for number, name, size in self._led:
            axes = spec.dims[number]
            while axes and size % mesh.size(axes):
                axes = axes[:-1]
            if axes:
                assignment[name] = axes
        passed = spec.partial if self.passes else ()
        own = {axis for name in self._left for axis in assignment.get(name, ())}
        left = tuple(axis for axis in mesh.axis_names if axis in own or axis in passed)
        return Strategy(
            assignment=tuple(sorted(assignment.items())),
            operands=tuple([self._sharded(one, assignment, passed) for one in self.rule.operands]),
            results=tuple([self._sharded(one, assignment, left) for one in self.rule.results]),
        )

    def _sharded(
        self,
        dims: tuple[tuple[str, ...], ...],
        assignment: Mapping[str, tuple[str, ...]],
        partial: tuple[str, ...],
    ) -> ShardingSpec:
        split = [
            assignment.get(dim[0], ())
            if len(dim) == 1
            else tuple([axis for name in dim for axis in assignment.get(name, ())])
            for dim in dims
        ]
        return self.layouts.spec(tuple(split), partial)


@functools.lru_cache(maxsize=65536)
def _shardable(rule: ShardingRule) -> frozenset[str]:
    return frozenset(shardable_factors(rule))
