"""The arrays among a function's arguments: flattened in order, named, and put back into a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen

from alpa_meta.errors import PlanError


@frozen(eq=False)
class Arguments:
    """The leaves of a call's arguments but the static ones, in order.

    Leaf k is `leaves[k]`, of argument `argnums[k]`, at `paths[k]` inside it; `dynamic[k]` says
    whether it is an array. `treedef` has (structure, leaves that are no arrays) of each argument.
    """

    leaves: list[Any]
    dynamic: tuple[bool, ...]
    paths: tuple[str, ...]
    argnums: tuple[int, ...]
    treedef: tuple[Any, ...]
    static_argnums: tuple[int, ...]

    def arrays(self) -> list[Any]:
        """Return the leaves that are arrays."""
        return [leaf for leaf, dynamic in zip(self.leaves, self.dynamic, strict=True) if dynamic]

    def members(self, argnum: int) -> list[int]:
        """Return the positions of an argument's leaves."""
        return [k for k, number in enumerate(self.argnums) if number == argnum]

    def named_arrays(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        """Return (path with the argument's name, array) of the leaves that are arrays."""
        return [
            (names[argnum] + path, leaf)
            for path, argnum, leaf, dynamic in zip(
                self.paths, self.argnums, self.leaves, self.dynamic, strict=True
            )
            if dynamic
        ]

    def call_with(self, arrays: Iterable[Any]) -> list[Any]:
        """Return the arguments of the call with `arrays` in place of its arrays."""
        given = iter(arrays)
        leaves = iter(
            next(given) if dynamic else leaf
            for leaf, dynamic in zip(self.leaves, self.dynamic, strict=True)
        )
        args = []
        for number, (tree, rest) in enumerate(self.treedef):
            if number in self.static_argnums:
                args.append(rest)
            else:
                args.append(tree.unflatten([next(leaves) for _ in range(tree.num_leaves)]))
        return args


def flat_arguments(args: Sequence[Any], static_argnums: tuple[int, ...]) -> Arguments:
    """Return the leaves of `args`; what stands at `static_argnums` is kept as it is."""
    leaves, dynamic, paths, argnums, trees = [], [], [], [], []
    for number, arg in enumerate(args):
        if number in static_argnums:
            trees.append(("static", arg))
            continue
        flat, tree = jax.tree_util.tree_flatten_with_path(arg)
        marks = []
        for path, leaf in flat:
            leaves.append(leaf)
            dynamic.append(is_array(leaf))
            marks.append(None if dynamic[-1] else leaf)
            paths.append(jax.tree_util.keystr(path))
            argnums.append(number)
        trees.append((tree, tuple(marks)))
    return Arguments(
        leaves, tuple(dynamic), tuple(paths), tuple(argnums), tuple(trees), static_argnums
    )


def positional(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a call by position alone."""
    if not keywords:
        return args
    bound = inspect.signature(function).bind(*args, **keywords)
    if bound.kwargs:
        raise PlanError(
            f"argument {next(iter(bound.kwargs))!r} of the step can only be given by its name, "
            "which plans do not know; bind it with functools.partial, or make it positional"
        )
    return bound.args


def num_arguments(function: Callable[..., Any]) -> range | None:
    """Return how many arguments a function takes by position; None if that cannot be told."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return None
    places = [one for one in parameters if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
    return range(sum(one.default is one.empty for one in places), len(places) + 1)


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the first `count` parameters, `arg<k>` where there is none."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = []
    names = names[:count]
    return names + [f"arg{number}" for number in range(len(names), count)]


def is_array(leaf: Any) -> bool:
    """Return whether a pytree leaf is an array or a number."""
    shaped = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return shaped or isinstance(leaf, (bool, int, float, complex))


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array leaf; numbers are weakly typed."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct((), jnp.result_type(leaf), weak_type=True)


def strong(leaf: Any, dtype: Any) -> Any:
    """Return an array or number of state without its weak type, which no step gives back: jax would
    compile the program of the second step again."""
    if isinstance(leaf, (bool, int, float, complex)):
        return np.asarray(leaf, dtype)
    return jnp.asarray(leaf, dtype) if getattr(leaf, "weak_type", False) else leaf


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a leaf without weak types."""
    aval = abstract(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def abstract_arguments(args: tuple[Any, ...], static_argnums: Sequence[int]) -> tuple[Any, ...]:
    """Return arguments with shapes for their arrays and numbers, but those that are static."""

    def shape(leaf: Any) -> Any:
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            return abstract_leaf(leaf)
        if isinstance(leaf, (bool, int, float, complex)):
            return np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.result_type(type(leaf))))
        return leaf

    return tuple(
        arg if number in static_argnums else jax.tree.map(shape, arg)
        for number, arg in enumerate(args)
    )
