"""The user's training step as one flat program: inputs with paths and roles, phases, batch
scaling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from attrs import evolve, field, frozen

from alpa_meta.compat import open_jaxpr
from alpa_meta.errors import PlanError
from alpa_meta.microbatch.exactness import divergence, inexact_reasons
from alpa_meta.microbatch.example_dims import example_dims
from alpa_meta.microbatch.scaling import CONSTANT, MIXED, Scaling, batch_scaling
from alpa_meta.microbatch.single_example import scaling_of_one
from alpa_meta.passes.normalisation import (
    with_constants_in_update,
    with_whole_literals,
    without_markers,
)
from alpa_meta.passes.shared_reads import with_shared_reads
from alpa_meta.step.arguments import (
    Arguments,
    abstract,
    abstract_leaf,
    argument_names,
    flat_arguments,
    is_array,
)
from alpa_meta.step.phases import Phases, classify
from alpa_meta.step.roles import input_roles
from alpa_meta.step.trace import trace


@frozen
class Leaf:
    """One array among the step's inputs or outputs, with the path a user would write.

    A piece of a stacked array has a path of its own, with the layers; `leaf_path` is the array's.
    """

    path: str
    aval: jax.ShapeDtypeStruct
    role: str  # "state", "batch" or "constant"
    weak_type: bool = False
    piece_of: str | None = None

    @property
    def leaf_path(self) -> str:
        """The path of the user's array."""
        return self.piece_of or self.path


@frozen
class Part:
    """What an input or output of a program is of a leaf of the user's arguments or result.

    `leaf` is the leaf's position; [start, stop) the layers along dim 0, None for all of it.
    """

    leaf: int
    start: int | None = None
    stop: int | None = None


@frozen(eq=False)
class Program:
    """A training step at one microbatch size.

    `aliases[k]` is the input that output k replaces in the next step, or None. `scaling` says how
    each variable grows with the batch (of one microbatch: which have a dim of examples), `inexact`
    why cutting the batch changes the result, if it does. Inputs and outputs are whole leaves in
    order, or, where a scan over layers was cut, the parts of leaves that `input_parts` and
    `output_parts` say.
    """

    closed: Any
    inputs: tuple[Leaf, ...]
    outputs: tuple[str, ...]
    aliases: tuple[int | None, ...]
    phases: Phases
    scaling: Mapping[Any, Scaling]
    num_microbatches: int
    inexact: tuple[str, ...]
    input_parts: tuple[Part, ...] = ()
    output_parts: tuple[Part, ...] = ()

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
    def _arguments(self) -> Arguments:
        return flat_arguments(self.args, self.static_argnums)

    @functools.cached_property
    def _named_arrays(self) -> list[tuple[str, Any]]:
        return self._arguments.named_arrays(argument_names(self.function, len(self.args)))

    def flatten(self, args: Sequence[Any]) -> list[Any]:
        """Return the array leaves of a call, in the order of `Program.inputs`; checks the
        structure."""
        arguments = flat_arguments(args, self.static_argnums)
        if arguments.treedef != self._arguments.treedef:
            raise PlanError(
                "the step is called with another structure of arguments than it was planned for: "
                f"{arguments.treedef} instead of {self._arguments.treedef}"
            )
        return arguments.arrays()

    def program(self, num_microbatches: int) -> Program:
        """Return the program of one of `num_microbatches` equal parts of the batch."""
        if num_microbatches not in self._programs:
            self._programs[num_microbatches] = _program(self, num_microbatches)
        return self._programs[num_microbatches]

    @functools.cached_property
    def batch_size(self) -> int | None:
        """The number of examples: the common first dim of the batch arguments, None without one."""
        sizes = {leaf.aval.shape[0] for leaf in self.leaves if leaf.role == "batch"}
        return int(sizes.pop()) if len(sizes) == 1 else None

    @functools.cached_property
    def microbatch_counts(self) -> tuple[int, ...]:
        """The numbers of equal parts that the batch can be cut into."""
        size = self.batch_size or 1
        return tuple(count for count in range(1, size + 1) if size % count == 0)

    @functools.cached_property
    def uncut(self) -> str:
        """Why the batch can only be taken whole, for want of a common first dim; else empty."""
        if self.batch_size is not None:
            return ""
        members: dict[int, list[Leaf]] = {}
        for leaf in self.leaves:
            if leaf.role == "batch":
                members.setdefault(leaf.aval.shape[0], []).append(leaf)
        if not members:
            return (
                "no argument of the step looks like a batch (arrays that are not returned as new "
                "state); name the batch arguments with batch_argnums"
            )
        sizes = ", ".join(
            f"{alike[0].path} {alike[0].aval.dtype}{list(alike[0].aval.shape)}"
            + (f" (and {len(alike) - 1} more of {size})" if len(alike) > 1 else "")
            for size, alike in members.items()
        )
        return (
            f"the arrays of the batch differ in their first dim: {sizes}; pass those that are not "
            "cut as arguments of their own, and name the arguments to cut with batch_argnums"
        )

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The array inputs, whole, in the order of `Program.inputs`."""
        return tuple(
            Leaf(name, abstract_leaf(leaf), role)
            for (name, leaf), role in zip(self._named_arrays, self._roles[0], strict=True)
        )

    @functools.cached_property
    def batch_arguments(self) -> tuple[int, ...]:
        """The positions of the arguments that hold the batch."""
        arguments = self._arguments
        pairs = zip(arguments.argnums, arguments.dynamic, strict=True)
        numbers = [number for number, dynamic in pairs if dynamic]
        found = (n for n, is_batch in zip(numbers, self._batch, strict=True) if is_batch)
        return tuple(dict.fromkeys(found))

    def paths_of(self, arguments: Sequence[int]) -> list[str]:
        """Return the path of every leaf of the arguments at these positions."""
        names, own = argument_names(self.function, len(self.args)), self._arguments
        return [
            names[number] + path
            for path, number in zip(own.paths, own.argnums, strict=True)
            if number in arguments
        ]

    @functools.cached_property
    def output_tree(self) -> tuple[Any, tuple[Any, ...], tuple[bool, ...], tuple[str, ...]]:
        """Return (tree, leaves that are no arrays in place, which leaves are arrays) of the
        result."""
        _, spec = self.traced(None)
        return spec  # type: ignore[no-any-return]

    @functools.cached_property
    def _roles(self) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
        jaxpr, (tree, kept, array_results, _) = self.traced(None)
        avals = iter(atom.aval for atom in open_jaxpr(jaxpr).outvars)
        marks = [
            next(avals) if dynamic else leaf
            for leaf, dynamic in zip(kept, array_results, strict=True)
        ]
        result = tree.unflatten(marks)
        return input_roles(self._arguments, result, array_results, self.batch_argnums)

    @functools.cached_property
    def _batch(self) -> tuple[bool, ...]:
        return tuple(role == "batch" for role in self._roles[0])

    @functools.cached_property
    def _weak_batch(self) -> bool:
        leaves = zip(self._named_arrays, self._batch, strict=True)
        return any(is_batch and abstract(leaf).weak_type for (_, leaf), is_batch in leaves)

    @functools.cached_property
    def inexact(self) -> tuple[str, ...]:
        """Why cutting the batch would change the result, empty if it would not."""
        if self.batch_size is None:
            return (self.uncut,)
        whole = self.program(1)
        scaling, _ = _scaling(self, self.batch_size, self.batch_size)
        return inexact_reasons(whole.jaxpr, whole.phases, scaling)

    def traced(self, batch: int | None) -> tuple[Any, Any]:
        """Return (flat jaxpr, output description) with `batch` examples; None: as called.

        Raises PlanError if the step does not take so many.
        """
        whole = batch is None or (batch == self.batch_size and not self._weak_batch)
        key = -1 if batch is None or whole else batch
        if key not in self._traces:
            try:
                self._traces[key] = _trace(self, None if whole else batch)
            except Exception as error:
                if whole:
                    raise
                raise PlanError(
                    f"the step takes batches of {self.batch_size} examples, but not of {batch}, so "
                    f"that its batch cannot be cut (use num_microbatches=1): {error}"
                ) from error
        return self._traces[key]


def _trace(step: Step, batch: int | None) -> tuple[Any, Any]:
    spec: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        result = step.function(*step._arguments.call_with(arrays))
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
    given = step._arguments.arrays()
    is_batch = step._batch if batch is not None else (False,) * len(given)
    for leaf, resize in zip(given, is_batch, strict=True):
        aval = abstract(leaf)
        if resize:
            aval = jax.ShapeDtypeStruct((batch, *aval.shape[1:]), aval.dtype)
        avals.append(aval)
    jaxpr, _ = trace(flat, *avals)
    return jaxpr, spec[0]


def _program(step: Step, num_microbatches: int) -> Program:
    if num_microbatches > 1:
        return _cut_program(step, num_microbatches)
    closed, _ = step.traced(step.batch_size)
    dims = example_dims(closed, [0 if is_batch else None for is_batch in step._batch])
    scaling = {var: Scaling("example", 0, dim) for var, dim in dims.items()}
    phases = classify(open_jaxpr(closed).eqns, scaling)
    closed, kept = without_markers(closed, phases.of_eqn)
    return _made(step, closed, evolve(phases, of_eqn=kept), scaling, 1)


def _cut_program(step: Step, num_microbatches: int) -> Program:
    size = _microbatch_size(step, num_microbatches)
    closed, whole = step.traced(size)[0], step.traced(size * num_microbatches)[0]
    scaling, pairs = _scaling(step, size, size * num_microbatches)
    phases = classify(open_jaxpr(closed).eqns, scaling)
    cut = with_whole_literals(closed, whole, phases.of_eqn, pairs)
    cut, kept = without_markers(cut, phases.of_eqn)
    cut, kept = with_constants_in_update(cut, kept, scaling)
    phases = evolve(phases, of_eqn=kept)
    inexact = inexact_reasons(open_jaxpr(cut), phases, scaling)
    # of one example, jax leaves sums out, which is no other program
    if inexact and size > 1 and (place := divergence(closed, whole)):
        inexact = (
            f"the step is another program for {size} examples than for {step.batch_size}: they "
            f"differ from {place} on",
        )
    return _made(step, cut, phases, scaling, num_microbatches, inexact)


def _made(
    step: Step,
    closed: Any,
    phases: Phases,
    scaling: Mapping[Any, Scaling],
    num_microbatches: int,
    inexact: tuple[str, ...] = (),
) -> Program:
    _, _, _, paths = step.output_tree
    known = dict(scaling)
    closed, of_eqn = with_shared_reads(closed, phases.of_eqn, known)
    return Program(
        closed=closed,
        inputs=step.leaves,
        outputs=paths,
        aliases=step._roles[1],
        phases=evolve(phases, of_eqn=of_eqn),
        scaling=known,
        num_microbatches=num_microbatches,
        inexact=inexact,
    )


def _microbatch_size(step: Step, num_microbatches: int) -> int:
    if step.batch_size is None:
        raise PlanError(
            f"{num_microbatches} microbatches need a batch to cut, but {step.uncut}; or use "
            "num_microbatches=1"
        )
    if step.batch_size % num_microbatches:
        raise PlanError(
            f"the batch has {step.batch_size} examples, which {num_microbatches} microbatches do "
            f"not divide; use one of {list(step.microbatch_counts[:16])} microbatches or another "
            "batch size"
        )
    return step.batch_size // num_microbatches


def _scaling(step: Step, size: int, whole: int) -> tuple[dict[Any, Scaling], dict[int, int]]:
    """Return the batch scaling of every variable of the program of `size` examples, of `whole`, and
    which equation of a larger program each of its equations is, by position.
    """
    given = [Scaling("example", 0, 0) if is_batch else CONSTANT for is_batch in step._batch]
    own = step.traced(size)[0]
    followed = max(size, 2)
    larger = whole if whole > followed else 2 * followed
    try:
        small, large = step.traced(followed)[0], step.traced(larger)[0]
    except PlanError:  # the step is written for one batch size: nothing is known
        return _unknown_scaling(open_jaxpr(own), given), {}
    found = batch_scaling(small, large, given, larger / followed)
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
