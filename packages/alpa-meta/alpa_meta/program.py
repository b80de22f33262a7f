"""The user's training step as one flat program: inputs with paths and roles, phases, batch
scaling."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attrs import field, frozen
from jax.extend import source_info_util

from alpa_meta.batch import CONSTANT, MIXED, Scaling, batch_scaling
from alpa_meta.compat import Literal, is_drop, open_jaxpr
from alpa_meta.errors import PlanError
from alpa_meta.normalisation import (
    with_constants_in_update,
    with_whole_literals,
    without_markers,
)
from alpa_meta.phases import Phases, classify
from alpa_meta.single_example import scaling_of_one
from alpa_meta.trace import trace


@frozen
class Leaf:
    """One array among the step's inputs or outputs, with the path a user would write."""

    path: str
    aval: jax.ShapeDtypeStruct
    role: str  # "state", "batch" or "constant"
    weak_type: bool = False


@frozen(eq=False)
class Program:
    """A training step at one microbatch size.

    `aliases[k]` is the input that output k replaces in the next step, or None. `scaling` says how
    each variable grows with the batch, `inexact` why cutting the batch would change the result, if
    it would.
    """

    closed: Any
    inputs: tuple[Leaf, ...]
    outputs: tuple[str, ...]
    aliases: tuple[int | None, ...]
    phases: Phases
    scaling: Mapping[Any, Scaling]
    num_microbatches: int
    inexact: tuple[str, ...]

    @property
    def jaxpr(self) -> Any:
        return open_jaxpr(self.closed)

    def signature(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return (path, whole shape, dtype) of every input."""
        return tuple(
            (leaf.path, tuple(leaf.aval.shape), str(leaf.aval.dtype)) for leaf in self.inputs
        )


@frozen(eq=False)
class Step:
    """A user's function with given argument shapes: how to flatten calls and rebuild results.

    Leaves that are no arrays (functions or strings inside modules) are kept aside and put back.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    batch_argnums: tuple[int, ...] | None = None
    static_argnums: tuple[int, ...] = ()
    _traces: dict[int, tuple[Any, Any]] = field(factory=dict, repr=False)
    _programs: dict[int, Program] = field(factory=dict, repr=False)

    @functools.cached_property
    def _layout(self) -> _Layout:
        return _layout_of(self.args, self.static_argnums)

    def flatten(self, args: Sequence[Any]) -> list[Any]:
        """Return the array leaves of a call, in the order of `Program.inputs`; checks the
        structure."""
        layout = _layout_of(tuple(args), self.static_argnums)
        if layout.treedef != self._layout.treedef:
            raise PlanError(
                "the step is called with another structure of arguments than it was planned for: "
                f"{layout.treedef} instead of {self._layout.treedef}"
            )
        return [
            leaf for leaf, dynamic in zip(layout.leaves, layout.dynamic, strict=True) if dynamic
        ]

    def program(self, num_microbatches: int) -> Program:
        """Return the program of one of `num_microbatches` equal parts of the batch."""
        if num_microbatches not in self._programs:
            self._programs[num_microbatches] = _program(self, num_microbatches)
        return self._programs[num_microbatches]

    @functools.cached_property
    def batch_size(self) -> int:
        """Return the number of examples: the common first dim of the batch arguments."""
        sizes = {
            name: np.shape(leaf)[0]
            for (name, leaf), is_batch in zip(_named_leaves(self), self._batch, strict=True)
            if is_batch
        }
        if len(set(sizes.values())) > 1:
            raise PlanError(
                "the arrays of the batch must agree in their first dim, got "
                + ", ".join(f"{path}: {size}" for path, size in sizes.items())
                + "; name the batch arguments with batch_argnums"
            )
        if not sizes:
            raise PlanError(
                "no argument of the step looks like a batch (arrays that are not returned as new "
                "state); name the batch arguments with batch_argnums"
            )
        (size,) = set(sizes.values())
        return int(size)

    @functools.cached_property
    def output_tree(self) -> tuple[Any, tuple[Any, ...], tuple[bool, ...], tuple[str, ...]]:
        """Return (tree, leaves that are no arrays in place, which leaves are arrays) of the
        result."""
        _, spec = self.traced(None)
        return spec  # type: ignore[no-any-return]

    @functools.cached_property
    def _roles(self) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
        return _roles(self)

    @functools.cached_property
    def _batch(self) -> tuple[bool, ...]:
        return tuple(role == "batch" for role in self._roles[0])

    def traced(self, batch: int | None) -> tuple[Any, Any]:
        """Return (flat jaxpr, output description) with `batch` examples; None: as called."""
        key = -1 if batch is None else batch
        if key not in self._traces:
            self._traces[key] = _trace(self, batch)
        return self._traces[key]


@frozen(eq=False)
class _Layout:
    leaves: list[Any]
    dynamic: tuple[bool, ...]
    paths: tuple[str, ...]
    argnums: tuple[int, ...]
    treedef: Any


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array leaf."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct((), jnp.result_type(leaf), weak_type=True)


def is_array(leaf: Any) -> bool:
    """Return whether a pytree leaf is an array or a number."""
    shaped = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return shaped or isinstance(leaf, (bool, int, float, complex))


def _layout_of(args: tuple[Any, ...], static_argnums: tuple[int, ...]) -> _Layout:
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
    return _Layout(leaves, tuple(dynamic), tuple(paths), tuple(argnums), tuple(trees))


def _trace(step: Step, batch: int | None) -> tuple[Any, Any]:
    layout = step._layout
    spec: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        leaves = iter(
            next(given) if dynamic else leaf
            for leaf, dynamic in zip(layout.leaves, layout.dynamic, strict=True)
        )
        args = []
        for number, (tree, _) in enumerate(layout.treedef):
            if number in step.static_argnums:
                args.append(step.args[number])
            else:
                args.append(tree.unflatten([next(leaves) for _ in range(tree.num_leaves)]))
        result = step.function(*args)
        paths_leaves, tree = jax.tree_util.tree_flatten_with_path(result)
        arrays_out = tuple(is_array(leaf) for _, leaf in paths_leaves)
        kept = tuple(
            None if is_array else leaf
            for (_, leaf), is_array in zip(paths_leaves, arrays_out, strict=True)
        )
        paths = tuple(
            jax.tree_util.keystr(path)
            for (path, _), is_array in zip(paths_leaves, arrays_out, strict=True)
            if is_array
        )
        spec[:] = [(tree, kept, arrays_out, paths)]
        return [leaf for (_, leaf), keep in zip(paths_leaves, arrays_out, strict=True) if keep]

    avals = []
    dynamic_leaves = [
        leaf for leaf, dynamic in zip(layout.leaves, layout.dynamic, strict=True) if dynamic
    ]
    is_batch = step._batch if batch is not None else (False,) * len(dynamic_leaves)
    for leaf, resize in zip(dynamic_leaves, is_batch, strict=True):
        aval = abstract(leaf)
        if resize:
            aval = jax.ShapeDtypeStruct((batch, *aval.shape[1:]), aval.dtype)
        avals.append(aval)
    jaxpr, _ = trace(flat, *avals)
    return jaxpr, spec[0]


def _roles(step: Step) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Return the role of each input leaf and, per output leaf, the input it replaces."""
    layout = step._layout
    _, (tree, kept, arrays_out, _) = step.traced(None)
    jaxpr = open_jaxpr(step.traced(None)[0])
    out_avals = iter(atom.aval for atom in jaxpr.outvars)
    marks = [
        next(out_avals) if is_array else leaf
        for leaf, is_array in zip(kept, arrays_out, strict=True)
    ]
    spans = _elements(tree.unflatten(marks), step)
    number_of_leaf, count = {}, 0
    for leaf_number, is_array in enumerate(arrays_out):
        if is_array:
            number_of_leaf[leaf_number] = count
            count += 1
    aliases: list[int | None] = [None] * count
    taken: set[int] = set()
    roles = ["constant"] * sum(layout.dynamic)
    dynamic_number = np.cumsum(layout.dynamic) - 1
    for argnum in dict.fromkeys(layout.argnums):
        members = [k for k, number in enumerate(layout.argnums) if number == argnum]
        tree_in = layout.treedef[argnum][0]
        chosen = None
        if step.batch_argnums is None or argnum not in step.batch_argnums:
            chosen = _matching(members, tree_in, layout, spans, taken)
        if chosen is not None:
            taken.add(chosen)
            _, start, _ = spans[chosen]
            for offset, member in enumerate(members):
                if layout.dynamic[member]:
                    roles[dynamic_number[member]] = "state"
                    aliases[number_of_leaf[start + offset]] = int(dynamic_number[member])
            continue
        named = step.batch_argnums is not None and argnum in step.batch_argnums
        if step.batch_argnums is None or named:
            for member in members:
                leaf = layout.leaves[member]
                if layout.dynamic[member] and np.ndim(leaf) and (named or not _is_key(leaf)):
                    roles[dynamic_number[member]] = "batch"
    return tuple(roles), tuple(aliases)


def _elements(result: Any, step: Step) -> list[tuple[Any, int, list[Any]]]:
    """Return (structure, first leaf, leaves) of each part of the result that may be new state: the
    whole result if it is one argument's, else its elements.
    """
    layout = step._layout
    whole, structure = jax.tree.flatten(result)
    for argnum in dict.fromkeys(layout.argnums):
        members = [k for k, number in enumerate(layout.argnums) if number == argnum]
        tree = layout.treedef[argnum][0]
        if _matching(members, tree, layout, [(structure, 0, whole)], set()) is not None:
            return [(structure, 0, whole)]
    elements = list(result) if type(result) in (tuple, list) else [result]
    spans, position = [], 0
    for element in elements:
        flat, structure = jax.tree.flatten(element)
        spans.append((structure, position, flat))
        position += len(flat)
    return spans


def _matching(
    members: list[int], tree: Any, layout: _Layout, spans: list[Any], taken: set[int]
) -> int | None:
    """Return the output element with the structure, shapes and dtypes of an argument."""
    if not any(layout.dynamic[member] for member in members):
        return None
    for number, (other, _, leaves) in enumerate(spans):
        if number in taken or other != tree:
            continue
        pairs = zip(members, leaves, strict=True)
        if all(
            not layout.dynamic[member]
            or (
                tuple(np.shape(layout.leaves[member])) == tuple(leaf.shape)
                and abstract(layout.leaves[member]).dtype == leaf.dtype
            )
            for member, leaf in pairs
        ):
            return number
    return None


def _is_key(leaf: Any) -> bool:
    aval = abstract(leaf)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return True
    return aval.dtype == np.uint32 and tuple(aval.shape) in ((2,), (4,))


def _program(step: Step, num_microbatches: int) -> Program:
    if step.batch_size % num_microbatches:
        divisors = [d for d in range(1, step.batch_size + 1) if step.batch_size % d == 0]
        raise PlanError(
            f"the batch has {step.batch_size} examples, which {num_microbatches} microbatches do "
            f"not divide; use one of {divisors[:16]} microbatches or another batch size"
        )
    size = step.batch_size // num_microbatches
    closed, (_, _, _, paths) = step.traced(size)
    roles, aliases = step._roles
    scaling, pairs = _scaling(step, size, roles)
    phases = classify(open_jaxpr(closed).eqns, scaling)
    if num_microbatches > 1:
        whole = step.traced(step.batch_size)[0]
        closed = with_whole_literals(closed, whole, phases.of_eqn, pairs)
    closed, kept = without_markers(closed, phases.of_eqn)
    if num_microbatches > 1:
        closed, kept = with_constants_in_update(closed, kept, scaling)
    phases = Phases(kept, phases.recognised_by)
    jaxpr = open_jaxpr(closed)
    inputs = tuple(
        Leaf(name, abstract_leaf(leaf), role)
        for (name, leaf), role in zip(_named_leaves(step), roles, strict=True)
    )
    return Program(
        closed=closed,
        inputs=inputs,
        outputs=paths,
        aliases=aliases,
        phases=phases,
        scaling=scaling,
        num_microbatches=num_microbatches,
        inexact=_inexact(jaxpr, phases, scaling),
    )


def _scaling(
    step: Step, size: int, roles: Sequence[str]
) -> tuple[dict[Any, Scaling], dict[int, int]]:
    """Return the batch scaling of every variable of the program of `size` examples, and which
    equation of a larger program each of its equations is, by position.
    """
    given = [Scaling("example", 0, 0) if role == "batch" else CONSTANT for role in roles]
    own = step.traced(size)[0]
    followed = max(size, 2)
    try:
        small, large = step.traced(followed)[0], step.traced(2 * followed)[0]
    except (TypeError, ValueError):  # the step is written for one batch size: nothing is known
        return _unknown_scaling(open_jaxpr(own), given), {}
    found = batch_scaling(small, large, given)
    if size < followed:
        matched = scaling_of_one(own, small, found)
        return matched or (batch_scaling(own, small, given), {})
    count = len(open_jaxpr(own).eqns)
    same = count == len(open_jaxpr(large).eqns)
    return found, {k: k for k in range(count)} if same else {}


def _unknown_scaling(jaxpr: Any, inputs: Sequence[Scaling]) -> dict[Any, Scaling]:
    """Return the scaling of every variable when only the inputs' is known."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    known.update((var, MIXED) for eqn in jaxpr.eqns for var in eqn.outvars)
    return known


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a leaf without weak types."""
    aval = abstract(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _named_leaves(step: Step) -> list[tuple[str, Any]]:
    layout = step._layout
    names = _argument_names(step)
    return [
        (names[argnum] + path, leaf)
        for path, argnum, leaf, dynamic in zip(
            layout.paths, layout.argnums, layout.leaves, layout.dynamic, strict=True
        )
        if dynamic
    ]


def _argument_names(step: Step) -> list[str]:
    try:
        names = list(inspect.signature(step.function).parameters)
    except (TypeError, ValueError):
        names = []
    names = names[: len(step.args)]
    return names + [f"arg{number}" for number in range(len(names), len(step.args))]


def _inexact(jaxpr: Any, phases: Phases, scaling: Mapping[Any, Scaling]) -> tuple[str, ...]:
    """Return why microbatches would change the result: mixed values that leave them, and work on
    examples in the update, which sees no microbatch.
    """
    inside: set[Any] = set()
    mixed, late = False, None
    for eqn, phase in zip(jaxpr.eqns, phases.of_eqn, strict=True):
        if phase != "update":
            inside.update(var for var in eqn.outvars if not is_drop(var))
            continue
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        forms = {scaling.get(atom, CONSTANT).form for atom in read}
        mixed |= any(_mixed(atom, scaling) for atom in read if atom in inside)
        if "example" in forms and late is None:
            late = eqn
    mixed |= any(
        _mixed(atom, scaling)
        for atom in jaxpr.outvars
        if not isinstance(atom, Literal) and atom in inside
    )
    reasons = []
    if mixed:
        reasons.append(
            f"{_first_mixed(jaxpr, scaling)} mixes examples of the batch in a way that "
            "microbatches cannot reproduce"
        )
    if late is not None:
        reasons.append(
            f"{late.primitive.name} at {source_line(late)} works on the examples of the batch "
            "after the update"
        )
    return tuple(reasons)


def _mixed(atom: Any, scaling: Mapping[Any, Scaling]) -> bool:
    return scaling.get(atom, CONSTANT).form == "mixed"


def _first_mixed(jaxpr: Any, scaling: Mapping[Any, Scaling]) -> str:
    """Return the first operation with a mixed result, and where the user's code makes or uses
    it."""
    found = [
        eqn
        for eqn in jaxpr.eqns
        if any(not is_drop(var) and _mixed(var, scaling) for var in eqn.outvars)
    ]
    place = next((place for eqn in found if (place := source_line(eqn))), "")
    if source_line(found[0]) or not place:
        return _described(found[0])
    return f"{found[0].primitive.name}, used at {place},"


def _described(eqn: Any) -> str:
    place = source_line(eqn)
    return f"{eqn.primitive.name} at {place}" if place else str(eqn.primitive.name)


def source_line(eqn: Any) -> str:
    """Return file:line of the user's code behind an equation, or an empty string."""
    try:
        return str(source_info_util.summarize(eqn.source_info))
    except (AttributeError, TypeError):
        return ""
