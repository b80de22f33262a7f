"""The arrays among a function's arguments: flattened in order, named, and put back into a call."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from jax.tree_util import PyTreeDef

from alpa_meta.errors import PlanError
from alpa_meta.types import DType, Function, PyTree


@frozen(eq=False)
class Arguments:
    """The leaves of a call's arguments but the static ones, in order.

    Leaf k is `leaves[k]`, of argument `argnums[k]`, at `paths[k]` inside it; `dynamic[k]` says
    whether it is an array. `treedef` has (structure, leaves that are no arrays) of each argument.
    """

    leaves: list[PyTree]
    dynamic: tuple[bool, ...]
    paths: tuple[str, ...]
    argnums: tuple[int, ...]
    treedef: tuple[tuple[PyTreeDef, PyTree], ...]
    static_argnums: tuple[int, ...]

    def arrays(self) -> list[PyTree]:
        """Return the leaves that are arrays."""
        return [leaf for leaf, dynamic in zip(self.leaves, self.dynamic, strict=True) if dynamic]

    def members(self, argnum: int) -> list[int]:
        """Return the positions of an argument's leaves."""
        return [k for k, number in enumerate(self.argnums) if number == argnum]

    def named_arrays(self, names: Sequence[str]) -> list[tuple[str, PyTree]]:
        """Return (path with the argument's name, array) of the leaves that are arrays."""
        return [
            (names[argnum] + path, leaf)
            for path, argnum, leaf, dynamic in zip(
                self.paths, self.argnums, self.leaves, self.dynamic, strict=True
            )
            if dynamic
        ]

    def call_with(self, arrays: Iterable[PyTree]) -> list[PyTree]:
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


def flat_arguments(args: Sequence[PyTree], static_argnums: tuple[int, ...]) -> Arguments:
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
    function: Function[PyTree], args: tuple[PyTree, ...], keywords: Mapping[str, PyTree]
) -> tuple[PyTree, ...]:
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


def num_arguments(function: Function[PyTree]) -> range | None:
    """Return how many arguments a function takes by position; None if that cannot be told."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return None
    places = [one for one in parameters if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
    return range(sum(one.default is one.empty for one in places), len(places) + 1)


def check_positions(
    function: Function[PyTree], count: int, **options: Sequence[int] | None
) -> None:
    """Raise PlanError where options name arguments that neither a call of `count` arguments nor the
    function has, or two of them the same one."""
    taken = num_arguments(function)
    most = max(count, 0 if taken is None else taken.stop - 1)
    named_by: dict[int, str] = {}
    for option, positions in options.items():
        for position in positions or ():
            if position >= most:
                raise PlanError(
                    f"{option}={positions} names argument {position}, but the step takes {most}, "
                    "numbered from 0"
                )
            if named_by.setdefault(position, option) != option:
                raise PlanError(
                    f"argument {position} of the step is named by {named_by[position]} and by "
                    f"{option}; leave it out of one of them"
                )


def of_state_and_batch(
    function: Function[PyTree], state: PyTree, batch: PyTree
) -> tuple[PyTree, ...]:
    """Return the arguments of a call; a tuple is several if the step takes as many."""
    spread = [(one,) for one in (state, batch)]
    forms = [
        [one] if type(given) is not tuple else [one, given]
        for one, given in zip(spread, (state, batch), strict=True)
    ]
    calls = [(*states, *batches) for states in forms[0] for batches in forms[1]]
    taken = num_arguments(function)
    if taken is None:
        return (*forms[0][0], *forms[1][-1])
    fitting = [call for call in calls if len(call) in taken]
    if not fitting:
        raise PlanError(
            f"init was given a state and a batch for {len(calls[-1])} arguments, but the step "
            f"takes {taken.stop - 1}; make() must return a tuple of all state arguments, and "
            "batch must be a tuple of all others"
        )
    return fitting[0]


def argument_names(function: Function[PyTree], count: int) -> list[str]:
    """Return the names of the first `count` parameters, `arg<k>` where there is none."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = []
    names = names[:count]
    return names + [f"arg{number}" for number in range(len(names), count)]


def is_array(leaf: PyTree) -> bool:
    """Return whether a pytree leaf is an array or a number."""
    shaped = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return shaped or isinstance(leaf, (bool, int, float, complex))


def abstract(leaf: PyTree) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array leaf; numbers are weakly typed."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct((), jnp.result_type(leaf), weak_type=True)


def strong(leaf: PyTree, dtype: DType) -> PyTree:
    """Return an array or number of state without its weak type, which no step gives back: jax would
    compile the program of the second step again."""
    if isinstance(leaf, (bool, int, float, complex)):
        return np.asarray(leaf, dtype)
    return jnp.asarray(leaf, dtype) if getattr(leaf, "weak_type", False) else leaf


def abstract_leaf(leaf: PyTree) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a leaf without weak types."""
    aval = abstract(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def abstract_arguments(
    args: tuple[PyTree, ...], static_argnums: Sequence[int]
) -> tuple[PyTree, ...]:
    """Return arguments with shapes for their arrays and numbers, but those that are static."""

    def shape(leaf: PyTree) -> PyTree:
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            return abstract_leaf(leaf)
        if isinstance(leaf, (bool, int, float, complex)):
            return np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.result_type(type(leaf))))
        return leaf

    return tuple(
        arg if number in static_argnums else jax.tree.map(shape, arg)
        for number, arg in enumerate(args)
    )
