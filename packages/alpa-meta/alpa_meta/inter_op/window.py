"""A window: the equations of a program with repeated layers left out, and how often each counts.

Where a unit of up to MAX_PERIOD layers is repeated, its first and its last copy stay:

    program   a  b1 b2 b3 b4 b5  c           window   a  b1 b5  c
                                             times    1   3  2  1

A value of a layer that was left out is read from a copy that stayed: one of the forward pass from
the first copy, one of the backward pass from the last. So every edge of the whole program has one
like it in the window: b1 to b5 stands for the four from one copy to the next, a to b1 for itself.
As equal layers share their choice (`folding`), the selection problem of the window is that of the
program, and takes as long to build as the program has *kinds* of layers.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from attrs import evolve, frozen

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, is_drop
from alpa_meta.inter_op.staging import Staging
from alpa_meta.intra_op.folding import fold_keys, layer_classes

MAX_PERIOD = 4  # layers; models alternate two kinds (dense and experts), few repeat more at once


@frozen(eq=False)
class Window:
    """The staging of a window and, by position, how often its equations and reads count.

    `keys` fold equations as those of the program (`folding`); `reads[k][var]` is the count of
    equation k's read of `var` where it is not `times[k]`.
    `layer_of[l]` are the layers of the window that stand for layer l, in the forward pass and in
    the backward pass.
    """

    staging: Staging
    keys: tuple[Hashable | None, ...]
    times: tuple[int, ...]
    reads: Mapping[int, Mapping[Var, int]]
    layer_of: tuple[tuple[int, int], ...]
    classes: tuple[int, ...]  # of each layer of the program

    def ordered(self, order: Sequence[int]) -> Window:
        """Return the window as its equations count in another order, positions of its own."""
        return evolve(
            self,
            keys=tuple(self.keys[k] for k in order),
            times=tuple(self.times[k] for k in order),
            reads={place: self.reads[k] for place, k in enumerate(order) if k in self.reads},
        )


class UnlikeCopiesError(Exception):
    """The copies of a repeated unit that a short program kept are not alike at this size."""


@frozen
class Run:
    """`count` copies of a unit of `period` layers, from layer `start`."""

    start: int
    period: int
    count: int

    def layers(self) -> range:
        return range(self.start, self.start + self.period * self.count)

    def unit(self, layer: int) -> int:
        return (layer - self.start) // self.period

    def first(self, layer: int) -> int:
        """Return the layer of the first copy that is like `layer`."""
        return self.start + (layer - self.start) % self.period

    def last(self, layer: int) -> int:
        """Return the layer of the last copy that is like `layer`."""
        return self.first(layer) + (self.count - 1) * self.period


def repeated_units(classes: Sequence[int]) -> list[Run]:
    """Return the units of layers that are repeated three times or more, first to last."""
    runs, start = [], 0
    while start < len(classes):
        best = Run(start, 1, 1)
        for period in range(1, MAX_PERIOD + 1):
            unit, count = classes[start : start + period], 1
            while classes[start + count * period :][:period] == unit and len(unit) == period:
                count += 1
            if count >= 3 and period * (count - 2) > best.period * (best.count - 2):
                best = Run(start, period, count)
        if best.count >= 3:
            runs.append(best)
        start += best.period * best.count
    return runs


def window_of(
    staging: Staging,
    num_layers: int,
    results: Collection[Atom],
    marks: Mapping[Var, Hashable] | None = None,
    left_out: Mapping[int, int] | None = None,
) -> Window:
    """Return the window of a program with the given results that is staged as one stage.

    `marks`: those of `fold_keys`. `left_out[l]` is the layer of a short program that is like layer
    l, which it lacks.
    """
    keys = fold_keys(staging.eqns, staging.phases, staging.layers, marks)
    classes = layer_classes(keys, staging.layers, num_layers)
    for layer, like in (left_out or {}).items():
        classes[layer] = classes[like]
    run_of = {layer: run for run in repeated_units(classes) for layer in run.layers()}
    for run in run_of.values():
        assert all(classes[run.first(k)] == classes[k] for k in run.layers())
    kept = {
        layer
        for layer in range(num_layers)
        if layer not in run_of or layer in (run_of[layer].first(layer), run_of[layer].last(layer))
    }
    if not kept.isdisjoint(left_out or ()):
        raise UnlikeCopiesError
    try:
        return _Cutter(staging, keys, run_of, kept).window(tuple(classes), results)
    except UnlikeCopiesError:  # its copies read from one another both ways
        if left_out:
            raise
        every = set(range(num_layers))
        return _Cutter(staging, keys, {}, every).window(tuple(classes), results)


class _Cutter:
    """What leaves layers out of a staging."""

    def __init__(
        self,
        staging: Staging,
        keys: Sequence[Hashable | None],
        run_of: Mapping[int, Run],
        kept: set[int],
    ) -> None:
        self.staging, self.keys, self.run_of, self.kept = staging, keys, run_of, kept
        self._place = [key[1] if isinstance(key, tuple) else None for key in keys]
        self._at = {
            (layer, place): k
            for k, (layer, place) in enumerate(zip(staging.layers, self._place, strict=True))
            if layer is not None
        }
        self._maker = {
            var: (k, number)
            for k, eqn in enumerate(staging.eqns)
            for number, var in enumerate(eqn.outvars)
            if not is_drop(var)
        }

    def window(self, classes: tuple[int, ...], results: Collection[Atom]) -> Window:
        staging = self.staging
        chosen, eqns = self._chosen(results)
        reads = {}
        for position, k in enumerate(chosen):
            found = self._reads(k)
            if found:
                reads[position] = found
        part = evolve(
            staging,
            eqns=tuple(eqns),
            phases=tuple(staging.phases[k] for k in chosen),
            stages=tuple(staging.stages[k] for k in chosen),
            layers=tuple(staging.layers[k] for k in chosen),
            levels=tuple(staging.levels[k] for k in chosen),
        )
        times = tuple(self._times(layer) for layer in part.layers)
        layer_of = tuple(map(self._stand_ins, range(len(classes))))
        keys = tuple(self.keys[k] for k in chosen)
        return Window(part, keys, times, reads, layer_of, classes)

    def _chosen(self, results: Collection[Atom]) -> tuple[list[int], list[JaxprEqn]]:
        """Return the positions of the equations that stay, and what they become, each behind those
        that it reads from.

        Of those without a layer (scalars of the update) only what is read stays.
        """
        staging, needed = self.staging, set(results)
        found: list[tuple[int, JaxprEqn]] = []
        for k in range(len(staging.eqns) - 1, -1, -1):
            eqn, layer = staging.eqns[k], staging.layers[k]
            if layer is None:
                stays = bool(eqn.effects) or not needed.isdisjoint(eqn.outvars)
            else:
                stays = layer in self.kept
            if stays:
                found.append((k, self._rewired(eqn)))
                needed.update(a for a in found[-1][1].invars if not isinstance(a, Literal))
        found.reverse()
        return ordered(found)

    def _stand_ins(self, layer: int) -> tuple[int, int]:
        """Return the layers whose forward and backward pass stand for a layer's.

        Inside a run, what a copy reads comes from a copy: so it is in the last one's forward pass
        and in the first one's backward pass.
        """
        if layer in self.kept:
            return layer, layer
        run = self.run_of[layer]
        return run.last(layer), run.first(layer)

    def _times(self, layer: int | None) -> int:
        run = None if layer is None else self.run_of.get(layer)
        if run is None or layer is None:
            return 1
        return run.count // 2 if layer == run.last(layer) else run.count - run.count // 2

    def _rewired(self, eqn: JaxprEqn) -> JaxprEqn:
        operands = [a if isinstance(a, Literal) else self._stand_in(a) for a in eqn.invars]
        same = all(one is two for one, two in zip(operands, eqn.invars, strict=True))
        return eqn if same else eqn.replace(invars=operands)

    def _stand_in(self, var: Var) -> Var:
        """Return the value of the window that stands for `var`."""
        if var not in self._maker:
            return var
        k, number = self._maker[var]
        layer = self.staging.layers[k]
        if layer is None or layer in self.kept:
            return var
        run = self.run_of[layer]
        backward = self.staging.phases[k] == "backward"
        like = run.last(layer) if backward else run.first(layer)
        return self.staging.eqns[self._at[like, self._place[k]]].outvars[number]

    def _reads(self, k: int) -> dict[Var, int]:
        """Return how often reads of an equation count that do not count as often as itself."""
        eqn, layer = self.staging.eqns[k], self.staging.layers[k]
        run = None if layer is None else self.run_of.get(layer)
        if run is None or layer is None:
            return {}
        other = run.first(layer) if layer == run.last(layer) else run.last(layer)
        twin = self.staging.eqns[self._at[other, self._place[k]]]
        found: dict[Var, int] = {}
        for atom, like in zip(eqn.invars, twin.invars, strict=True):
            if isinstance(atom, Literal) or atom not in self._maker:
                continue
            origin = self.staging.layers[self._maker[atom][0]]
            if origin is None or origin in run.layers() and run.unit(origin) == run.unit(layer):
                continue
            if origin in run.layers():
                found[self._stand_in(atom)] = run.count - 1
            elif atom is not like:
                found[self._stand_in(atom)] = 1
        return found


def ordered(
    chosen: Sequence[tuple[int, JaxprEqn]],
) -> tuple[list[int], list[JaxprEqn]]:
    """Return positions and equations in their order but that each is behind those it reads from;
    UnlikeCopiesError where there is no such order.

    The copy that a value is read from may be updated later: the update goes by names, of which
    Dense_10 is before Dense_2, and the gradient of a bias may belong to the layer behind its own.
    """
    maker = {var: n for n, (_, eqn) in enumerate(chosen) for var in eqn.outvars}
    reads = {
        n: {maker[a] for a in eqn.invars if not isinstance(a, Literal) and a in maker}
        for n, (_, eqn) in enumerate(chosen)
    }
    waiting, ready, found = TopologicalSorter(reads), list[int](), list[int]()
    try:
        waiting.prepare()
    except CycleError as error:
        raise UnlikeCopiesError from error
    while waiting.is_active():
        for n in waiting.get_ready():
            heapq.heappush(ready, n)
        found.append(heapq.heappop(ready))
        waiting.done(found[-1])
    return [chosen[n][0] for n in found], [chosen[n][1] for n in found]
