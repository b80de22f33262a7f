"""Calls of a step as people write it, as calls of a function of pytrees of arrays.

Two libraries give steps arguments that are more than that; each is asked for only where the program
has imported it:

- flax nnx: modules, optimisers, `Rngs` and metrics are objects that the step updates in place, as
  under `nnx.jit`. Each such argument becomes its state; the pure function merges, calls the step
  and splits again, and `finish` writes what came back into the caller's objects.
- equinox: Python numbers inside modules are static, as under `eqx.filter_jit`; for a step that
  equinox itself has wrapped, all Python numbers are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType

import jax
from attrs import field, frozen

from alpa_meta.errors import PlanError
from alpa_meta.step.arguments import flat_arguments, is_array
from alpa_meta.types import Function, PyTree

_NO_MODULE = ModuleType("no module")
_TAG = "alpa_meta"  # of the nnx update context that ties a step's objects to the caller's


@frozen
class _Static:
    """A Python number that is not traced; of True, 1 and 1.0, or 0.0 and -0.0, none is another."""

    value: complex = field(eq=False)
    kind: str
    text: str


@frozen
class _Place:
    """Where an nnx object stands in a step's result, by its number."""

    number: int


@frozen(eq=False)
class PureCall:
    """A call `function(*args)` of pytrees of arrays that stands for a user's call.

    `key` is what a plan depends on beside the arguments; `objects` are the nnx objects of the call.
    `finish` takes the function's result and the objects of any call like this one, updates them
    and returns the user's result. `batch_dims` are the dims of its arrays that were moved in front
    (`alpa_meta.step.batch_dims`).
    """

    function: Function[PyTree]
    args: tuple[PyTree, ...]
    key: Hashable = None
    objects: tuple[PyTree, ...] = ()
    finish: Callable[[PyTree, tuple[PyTree, ...]], PyTree] = lambda result, objects: result
    batch_dims: tuple[int, ...] = ()

    def on_arrays(self, static_argnums: tuple[int, ...]) -> tuple[Function[PyTree], list[PyTree]]:
        """Return the function of the arrays among the arguments, and these arrays."""
        flat = flat_arguments(self.args, static_argnums)
        return lambda *arrays: self.function(*flat.call_with(arrays)), flat.arrays()


def pure_call(
    function: Function[PyTree], args: Sequence[PyTree], static_argnums: Sequence[int] = ()
) -> PureCall:
    """Return the pure call that stands for `function(*args)`; static arguments stay as they are."""
    everywhere = _is_equinox(function)
    traced = [k for k in range(len(args)) if k not in static_argnums]
    places = tuple(k for k in traced if holds_objects(args[k]))
    given = list(args)
    for k in traced:
        if k not in places:
            given[k] = _static_numbers(args[k], everywhere)
    if not places and all(new is old for new, old in zip(given, args, strict=True)):
        return PureCall(function, tuple(args))
    objects = tuple(args[k] for k in places)
    graph = _Graph(places)
    key = graph.split(given, objects) if places else None

    def pure(*args: PyTree) -> PyTree:
        values = [_numbers(arg) if k in traced else arg for k, arg in enumerate(args)]
        result = graph.run(function, values, key) if places else function(*values)
        return _static_numbers(result, everywhere)

    def finish(result: PyTree, objects: tuple[PyTree, ...]) -> PyTree:
        result = _numbers(result)
        return graph.written_back(result, objects) if places else result

    functools.update_wrapper(pure, function, updated=())
    return PureCall(pure, tuple(given), key, objects, finish)


def arrays_only(tree: PyTree) -> PyTree:
    """Return a pytree without its leaves that are no arrays."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)


class OneDevice:
    """A step as `jax.jit` runs it on one device, with all that `pure_call` knows of arguments."""

    def __init__(self, function: Function[PyTree]) -> None:
        self._function = function
        self._compiled: dict[Hashable, tuple[PureCall, Function[PyTree], list[PyTree]]] = {}

    def __call__(self, *args: PyTree) -> PyTree:
        """Return what the step returns."""
        call = pure_call(self._function, args)
        kept = tuple(leaf for leaf in jax.tree.leaves(call.args) if not is_array(leaf))
        key = (call.key, jax.tree.structure(call.args), kept)
        if key not in self._compiled:
            self._compiled[key] = (call, *_jitted(call))
        first, jitted, result = self._compiled[key]
        arrays = iter(jitted(*call.on_arrays(())[1]))
        structure, others = result
        leaves = [next(arrays) if is_array(leaf) else leaf for leaf in others]
        return first.finish(structure.unflatten(leaves), call.objects)


def _jitted(call: PureCall) -> tuple[Function[PyTree], list[PyTree]]:
    """Return the compiled function of arrays of a call, and the list it puts its result's structure
    and leaves in."""
    function, _ = call.on_arrays(())
    result: list[PyTree] = []

    def run(*arrays: PyTree) -> list[PyTree]:
        leaves, structure = jax.tree.flatten(function(*arrays))
        result[:] = [structure, [0 if is_array(leaf) else leaf for leaf in leaves]]
        return [leaf for leaf in leaves if is_array(leaf)]

    return jax.jit(run), result


# ---------------------------------------------------------------------- flax nnx


def holds_objects(tree: PyTree) -> bool:
    """Return whether nnx objects are among the nodes of a pytree."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree))
    return any(isinstance(node, nnx.Pytree) for node in nodes)


def flat_objects(tree: PyTree) -> tuple[list[PyTree], Callable[[Sequence[PyTree]], PyTree]]:
    """Return the leaves of a pytree, those of nnx objects in the order of their state, and the
    function that makes such a tree of other leaves."""
    state, rebuild = without_objects(tree)
    flat: tuple[list[PyTree], PyTree] = jax.tree.flatten(state)
    return flat[0], lambda new: rebuild(flat[1].unflatten(new))


def without_objects(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return a pytree of the leaves of `tree`, of nnx objects their state, and the function that
    makes such a tree as `tree` of another pytree like it."""
    if not holds_objects(tree):
        return tree, lambda new: new
    nnx: ModuleType = sys.modules["flax.nnx"]
    definition, state = nnx.split(tree)
    return state, lambda new: nnx.merge(definition, new)


class _Graph:
    """The nnx objects of a step: how they become states, and what a trace did to them.

    The four splits and merges are those of `nnx.update_context`: outside, inside, inside, outside.
    """

    def __init__(self, places: tuple[int, ...]) -> None:
        self.places = places
        self.nnx: ModuleType = sys.modules.get("flax.nnx", _NO_MODULE)
        self.after: PyTree = None  # the graph of objects and result, as the trace left it
        self.is_tuple = False  # whether the step returns several values

    def split(self, given: list[PyTree], objects: tuple[PyTree, ...]) -> Hashable:
        """Put states in the place of objects among `given` and return the objects' graph."""
        with self.nnx.update_context(_TAG), self.nnx.split_context(_TAG) as context:
            definition, state = context.split(objects)
        for number, place in enumerate(self.places):
            given[place] = self._part(state, number)
        return definition  # type: ignore[no-any-return]

    def run(self, function: Function[PyTree], values: list[PyTree], definition: PyTree) -> PyTree:
        """Return the states after the step, what it made beside them, and its results, a tuple."""
        given = {number: values[place] for number, place in enumerate(self.places)}
        with self.nnx.update_context(_TAG):
            with self.nnx.merge_context(_TAG, True) as context:
                objects = context.merge(definition, self.nnx.State(given))
            for place, node in zip(self.places, objects, strict=True):
                values[place] = node
            result = function(*values)
            made: list[PyTree] = []
            result = self._map_objects(lambda node: _numbered(node, made), result)
            with self.nnx.split_context(_TAG) as context:
                self.after, state = context.split((objects, tuple(made)))
        after = self._part(state, 0)
        states = [self._kept(after, number, before) for number, before in given.items()]
        self.is_tuple = type(result) is tuple
        rest = self.nnx.to_flat_state(state)
        known = {(0, number, *path) for number, one in enumerate(states) for path in _paths(one)}
        other = self.nnx.from_flat_state([(p, leaf) for p, leaf in rest if p not in known])
        return (*states, other, *(result if self.is_tuple else (result,)))

    def _kept(self, after: PyTree, number: int, before: PyTree) -> PyTree:
        """Return the variables of an argument that it had before the step, with their new values.

        What the step added is made by every step anew, and no state of it.
        """
        flat = dict(self.nnx.to_flat_state(self._part(after, number)))
        names = _paths(before)
        if any(name not in flat for name in names):
            gone = next(name for name in names if name not in flat)
            raise PlanError(
                f"the step removes the variable {'.'.join(map(str, gone))} of an nnx object; "
                "remove it before the first step"
            )
        return self.nnx.from_flat_state([(name, flat[name]) for name in names])

    def written_back(self, result: PyTree, objects: tuple[PyTree, ...]) -> PyTree:
        """Update `objects` by the result of the pure function and return the step's."""
        count = len(self.places)
        flat = [((0, k, *path), leaf) for k in range(count) for path, leaf in _flat(result[k])]
        state = self.nnx.from_flat_state([*flat, *self.nnx.to_flat_state(result[count])])
        with self.nnx.update_context(_TAG):
            with self.nnx.split_context(_TAG) as context:
                context.split(objects)
            with self.nnx.merge_context(_TAG, False) as context:
                _, made = context.merge(self.after, state)
        rest = result[count + 1 :]
        return jax.tree.map(
            lambda leaf: made[leaf.number] if isinstance(leaf, _Place) else leaf,
            rest if self.is_tuple else rest[0],
        )

    def _part(self, state: PyTree, number: int) -> PyTree:
        return state[number] if number in state else self.nnx.State({})

    def _map_objects(self, replace: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
        def is_object(node: PyTree) -> bool:
            return isinstance(node, self.nnx.Pytree)

        return jax.tree.map(
            lambda node: replace(node) if is_object(node) else node, tree, is_leaf=is_object
        )


def _numbered(node: PyTree, made: list[PyTree]) -> _Place:
    made.append(node)
    return _Place(len(made) - 1)


def _flat(state: PyTree) -> list[tuple[tuple[PyTree, ...], PyTree]]:
    """Return (path, variable) of a state."""
    return list(sys.modules["flax.nnx"].to_flat_state(state))


def _paths(state: PyTree) -> list[tuple[PyTree, ...]]:
    return [path for path, _ in _flat(state)]


# ---------------------------------------------------------------------- equinox


def _is_equinox(function: Function[PyTree]) -> bool:
    """Return whether a step is a callable that equinox made, such as `eqx.filter_jit(step)`."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(function, equinox.Module)


@functools.lru_cache(maxsize=4096)  # direct calls compare leaves by identity
def _static(value: complex, kind: str, text: str) -> _Static:
    return _Static(value, kind, text)


def _static_numbers(tree: PyTree, everywhere: bool) -> PyTree:
    """Return `tree` with the Python numbers of equinox modules (or all) as static leaves; itself
    if there are none."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return tree
    found = False

    def static(leaf: PyTree) -> PyTree:
        nonlocal found
        if isinstance(leaf, (bool, int, float, complex)) and not hasattr(leaf, "dtype"):
            found = True
            return _static(leaf, type(leaf).__name__, repr(leaf))
        return leaf

    def is_module(node: PyTree) -> bool:
        return isinstance(node, equinox.Module)

    def visit(node: PyTree) -> PyTree:
        return jax.tree.map(static, node) if everywhere or is_module(node) else node

    made = jax.tree.map(visit, tree, is_leaf=is_module)
    return made if found else tree


def _numbers(tree: PyTree) -> PyTree:
    """Return `tree` with static leaves as the numbers that they are."""
    return jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, _Static) else leaf, tree)
