"""The user's training step as one flat program: inputs with paths and roles, phases, and how
microbatches hold its values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
from attrs import evolve, field, frozen

from alpa_meta.compat import ClosedJaxpr, Jaxpr, Var, dtype_of, open_jaxpr, shape_of
from alpa_meta.errors import PlanError
from alpa_meta.microbatch.cut import cut_program
from alpa_meta.microbatch.cut_step import Cut, Given, Statistics
from alpa_meta.microbatch.example_dims import example_dims
from alpa_meta.microbatch.placement import REPLICATED, SUM, Placement, split
from alpa_meta.passes.accumulation_loops import with_rounds_at_once
from alpa_meta.passes.flat_program import FlatProgram
from alpa_meta.passes.order import rewritten
from alpa_meta.passes.update_order import update_by_array
from alpa_meta.step.arguments import (
    Arguments,
    abstract,
    abstract_leaf,
    argument_names,
    flat_arguments,
    is_array,
)
from alpa_meta.step.leaves import Leaf, LeftOut, OutputTree, Part, no_common_dim
from alpa_meta.step.phases import Phases, classify
from alpa_meta.step.roles import input_roles, moments
from alpa_meta.step.trace import trace
from alpa_meta.token_slices.places import SliceRequest, Slices
from alpa_meta.token_slices.program import in_wanted_slices
from alpa_meta.types import Function, PyTree


@frozen(eq=False)
class Whole:
    """The step on its whole batch, classified: what programs of any microbatch size are cut from.

    `placements` say which values are split along the batch; the rest as of a `Program`.
    """

    closed: ClosedJaxpr
    phases: Phases
    placements: Mapping[Var, Placement]
    inputs: tuple[Leaf, ...]
    outputs: tuple[str, ...]
    aliases: tuple[int | None, ...]
    slices: Slices | None = None
    slice_of: Mapping[Var, int] = field(factory=dict)


@frozen(eq=False)
class Program:
    """A training step at one microbatch size.

    `aliases[k]` is the input that output k replaces in the next step, or None. `placements` says
    how the microbatches hold each variable (of one microbatch: which have a dim of examples),
    `inexact` why the batch cannot be cut, if it cannot, `averaged` why it is the mean of its
    microbatches only. Behind the leaves, inputs are what every microbatch is given: `statistics` of
    the whole batch, and the sums over it that `totals` maps to the values added up
    (`microbatch.cut`). Inputs and outputs are whole leaves in order, or, where a scan over layers
    was cut, the parts of leaves that `input_parts` and `output_parts` say.

    `whole` is the program of the whole batch that it was cut from, whose layers are its layers;
    `origin` maps its variables to those that they are a part of, where they differ. `left_out` is
    what a short program lacks. In token slices, `slice_of` says which slice makes a value of the
    whole batch; the update's are of none.
    """

    closed: ClosedJaxpr
    inputs: tuple[Leaf, ...]
    outputs: tuple[str, ...]
    aliases: tuple[int | None, ...]
    phases: Phases
    placements: Mapping[Var, Placement]
    num_microbatches: int
    inexact: tuple[str, ...] = ()
    averaged: tuple[str, ...] = ()
    statistics: Statistics | None = None
    totals: Mapping[Var, Var] = field(factory=dict)
    input_parts: tuple[Part, ...] = ()
    output_parts: tuple[Part, ...] = ()
    whole: Program | None = None
    origin: Mapping[Var, Var] = field(factory=dict)
    left_out: LeftOut | None = None
    slices: Slices | None = None
    slice_of: Mapping[Var, int] = field(factory=dict)

    @property
    def jaxpr(self) -> Jaxpr:
        jaxpr: Jaxpr = open_jaxpr(self.closed)
        return jaxpr

    def signature(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return (path, whole shape, dtype) of every input."""
        return tuple(
            (leaf.path, tuple(leaf.aval.shape), str(leaf.aval.dtype)) for leaf in self.inputs
        )


@frozen(eq=False)
class Step:
    """A user's function with given argument shapes: how to flatten calls and rebuild results.

    Leaves that are no arrays (functions or strings inside modules) are kept aside and put back.
    `batch_dims` are the dims of its arrays that were moved in front (`alpa_meta.step.batch_dims`).
    """

    function: Function[PyTree]
    args: tuple[PyTree, ...]
    batch_argnums: tuple[int, ...] | None = None
    static_argnums: tuple[int, ...] = ()
    exact: bool = True  # whether microbatches must compute what the whole batch does
    offloads: bool = False  # whether the optimiser's arrays are kept in the memory of the hosts
    slices: SliceRequest = SliceRequest()  # of the tokens
    batch_dims: tuple[int, ...] = ()
    short: dict[Hashable, object] = field(
        factory=dict, repr=False
    )  # `planning.outlooks` keeps here
    _traces: dict[int, tuple[ClosedJaxpr, OutputTree]] = field(factory=dict, repr=False)
    _programs: dict[int, Program] = field(factory=dict, repr=False)

    @functools.cached_property
    def arguments(self) -> Arguments:
        """The leaves of the arguments but the static ones."""
        return flat_arguments(self.args, self.static_argnums)

    @functools.cached_property
    def _named_arrays(self) -> list[tuple[str, PyTree]]:
        return self.arguments.named_arrays(argument_names(self.function, len(self.args)))

    def flatten(self, args: Sequence[PyTree]) -> list[PyTree]:
        """Return the array leaves of a call, in the order of `Program.inputs`; checks the
        structure."""
        arguments = flat_arguments(args, self.static_argnums)
        if arguments.treedef != self.arguments.treedef:
            raise PlanError(
                "the step is called with another structure of arguments than it was planned for: "
                f"{arguments.treedef} instead of {self.arguments.treedef}"
            )
        return arguments.arrays()

    def unflatten(self, leaves: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """Return the arguments of a call with these array leaves."""
        return tuple(self.arguments.call_with(leaves))

    def rebuilt(self, results: Sequence[PyTree]) -> PyTree:
        """Return the step's result with these arrays."""
        tree, kept, is_array, _ = self.output_tree
        values = iter(results)
        pairs = zip(kept, is_array, strict=True)
        return tree.unflatten(next(values) if array else leaf for leaf, array in pairs)

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
        most = self._whole[1]
        return tuple(count for count in range(1, most + 1) if most % count == 0)

    @functools.cached_property
    def uncut(self) -> str:
        """Why the batch can only be taken whole, for want of a common first dim; else empty."""
        if self.batch_size is not None:
            return ""
        return no_common_dim([leaf for leaf in self.leaves if leaf.role == "batch"])

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The array inputs, whole, in the order of `Program.inputs`."""
        return tuple(
            Leaf(name, abstract_leaf(leaf), role)
            for (name, leaf), role in zip(self._named_arrays, self._roles[0], strict=True)
        )

    @property
    def aliases(self) -> tuple[int | None, ...]:
        """For each array of the result, the input that it replaces in the next call, or None."""
        return self._roles[1]

    def with_batch(self, size: int) -> Step:
        """Return the step for batches of another number of examples."""
        arrays = [
            jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype) if is_batch else array
            for array, is_batch in zip(self.arguments.arrays(), self._batch, strict=True)
        ]
        return evolve(
            self, short={}, traces={}, programs={}, args=tuple(self.arguments.call_with(arrays))
        )

    def with_offload(self) -> Step:
        """Return the step with the optimiser's arrays in the memory of the hosts."""
        return evolve(self, short={}, traces={}, programs={}, offloads=True)

    def in_slices(self, slices: SliceRequest) -> Step:
        """Return the step with its tokens in slices."""
        return evolve(self, short={}, traces={}, programs={}, slices=slices)

    def with_arguments(self, args: tuple[PyTree, ...]) -> Step:
        """Return the step for arguments of other shapes."""
        return evolve(self, short={}, traces={}, programs={}, args=args)

    @functools.cached_property
    def batch_arguments(self) -> tuple[int, ...]:
        """The positions of the arguments that hold the batch."""
        arguments = self.arguments
        pairs = zip(arguments.argnums, arguments.dynamic, strict=True)
        numbers = [number for number, dynamic in pairs if dynamic]
        found = (n for n, is_batch in zip(numbers, self._batch, strict=True) if is_batch)
        return tuple(dict.fromkeys(found))

    def paths_of(self, arguments: Sequence[int]) -> list[str]:
        """Return the path of every leaf of the arguments at these positions."""
        names, own = argument_names(self.function, len(self.args)), self.arguments
        return [
            names[number] + path
            for path, number in zip(own.paths, own.argnums, strict=True)
            if number in arguments
        ]

    @functools.cached_property
    def output_tree(self) -> OutputTree:
        """Return (tree, leaves that are no arrays in place, which leaves are arrays) of the
        result."""
        _, spec = self.traced(None)
        return spec

    @functools.cached_property
    def _roles(self) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
        jaxpr, (tree, kept, array_results, _) = self.traced(None)
        avals = iter(atom.aval for atom in open_jaxpr(jaxpr).outvars)
        marks = [
            next(avals) if dynamic else leaf
            for leaf, dynamic in zip(kept, array_results, strict=True)
        ]
        result = (tree, marks)
        return input_roles(jaxpr, self.arguments, result, array_results, self.batch_argnums)

    @functools.cached_property
    def _batch(self) -> tuple[bool, ...]:
        return tuple(role == "batch" for role in self._roles[0])

    @functools.cached_property
    def _weak_batch(self) -> bool:
        leaves = zip(self._named_arrays, self._batch, strict=True)
        return any(is_batch and abstract(leaf).weak_type for (_, leaf), is_batch in leaves)

    @property
    def whole(self) -> Whole:
        """The step on the whole batch."""
        return self._whole[0]

    @functools.cached_property
    def _whole(self) -> tuple[Whole, int]:
        """The step on the whole batch, and the most equal parts that it can be cut into: where it
        accumulates gradients, with all rounds at once, as many as those, or as a round has examples
        where those of each lie apart."""
        closed, size = self.traced(self.batch_size)[0], self.batch_size or 1
        for at_once, rounds in with_rounds_at_once(closed, _examples(self)) if size > 1 else ():
            whole = _classified(self, at_once)
            for most in (rounds, size // rounds) if size % rounds == 0 else ():
                if most > 1 and not _cut(whole, most).reasons:
                    return whole, most
        return _classified(self, closed), size

    @functools.cached_property
    def inexact(self) -> tuple[str, ...]:
        """Why the batch cannot be cut, empty if it can."""
        if self.batch_size is None:
            return (self.uncut,)
        if not self.exact:
            return ()
        try:
            return (
                _cut(self.whole, self.microbatch_counts[1]).reasons if self.batch_size > 1 else ()
            )
        except PlanError as error:
            return (str(error),)

    def traced(self, batch: int | None) -> tuple[ClosedJaxpr, OutputTree]:
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


def _trace(step: Step, batch: int | None) -> tuple[ClosedJaxpr, OutputTree]:
    spec: list[OutputTree] = []

    def flat(*arrays: PyTree) -> list[PyTree]:
        result = step.function(*step.arguments.call_with(arrays))
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
    given = step.arguments.arrays()
    is_batch = step._batch if batch is not None else (False,) * len(given)
    for leaf, resize in zip(given, is_batch, strict=True):
        aval = abstract(leaf)
        if resize:
            aval = jax.ShapeDtypeStruct((batch, *aval.shape[1:]), aval.dtype)
        avals.append(aval)
    jaxpr, _ = trace(flat, *avals)
    return jaxpr, spec[0]


def _program(step: Step, num_microbatches: int) -> Program:
    if num_microbatches == 1:
        return cut_into(step.whole, 1)
    _check_divides(step, num_microbatches)
    program = cut_into(step.whole, num_microbatches)
    if not program.inexact:
        return evolve(program, whole=step.program(1))
    if step.exact:
        return program
    return _averaged(step, num_microbatches, program.inexact)


def cut_into(whole: Whole, num_microbatches: int) -> Program:
    """Return the program of one of equal parts of the batch; if it cannot be cut, of all of it."""
    if num_microbatches == 1:
        return _made(whole, 1)
    cut = _cut(whole, num_microbatches)
    if cut.reasons:
        return evolve(_made(whole, num_microbatches), inexact=cut.reasons)
    needed = tuple(cut.totals.values())
    flat = rewritten(FlatProgram(cut.closed, cut.phases, cut.placements, needed), "cut")
    phases = evolve(whole.phases, of_eqn=flat.phases)
    part = evolve(whole, closed=flat.closed, phases=phases, placements=cut.placements)
    given = tuple(Leaf(one.name, _given_aval(one, num_microbatches), one.kind) for one in cut.given)
    return evolve(
        _made(part, num_microbatches),
        inputs=(*whole.inputs, *given),
        statistics=cut.statistics,
        totals=cut.totals,
        origin=cut.origin,
    )


def _given_aval(given: Given, num_microbatches: int) -> jax.ShapeDtypeStruct:
    """Return the type of what all microbatches are given together."""
    shape = shape_of(given.var)
    if given.kind in ("number", "part"):
        shape = (shape[0] * num_microbatches, *shape[1:])
    return jax.ShapeDtypeStruct(shape, dtype_of(given.var))


def _examples(step: Step) -> list[Placement | None]:
    return [split(0) if is_batch else None for is_batch in step._batch]


def _classified(step: Step, closed: ClosedJaxpr) -> Whole:
    placements = example_dims(closed, _examples(step))
    jaxpr, inputs = open_jaxpr(closed), step.leaves
    only = step._batch if step.batch_size == 1 else ()
    phases = classify(jaxpr.eqns, placements, list(itertools.compress(jaxpr.invars, only)))
    flat = rewritten(FlatProgram(closed, phases.of_eqn, placements), "classified")
    if step.offloads:
        flat = update_by_array(flat)
        kept = moments(flat, inputs)
        inputs = tuple(
            evolve(leaf, memory="pinned_host") if var in kept else leaf
            for var, leaf in zip(open_jaxpr(flat.closed).invars, inputs, strict=False)
        )
    whole = Whole(
        closed=flat.closed,
        phases=evolve(phases, of_eqn=flat.phases),
        placements=placements,
        inputs=inputs,
        outputs=step.output_tree[3],
        aliases=step.aliases,
    )
    return _in_slices(whole, step) if step.slices else whole


def _in_slices(whole: Whole, step: Step) -> Whole:
    """Return the step on its whole batch, the tokens in slices."""
    of_eqn, batch = whole.phases.of_eqn, step._batch
    made = in_wanted_slices(whole.closed, of_eqn, batch, step.slices)
    return evolve(
        whole,
        closed=made.closed,
        phases=evolve(whole.phases, of_eqn=made.phases),
        placements=example_dims(made.closed, _examples(step)),
        slices=made.slices,
        slice_of=made.slice_of,
    )


def _cut(whole: Whole, num_microbatches: int) -> Cut:
    inputs = [split(0) if leaf.role == "batch" else REPLICATED for leaf in whole.inputs]
    trained = [
        leaf.role != "batch" and jnp.issubdtype(leaf.aval.dtype, jnp.inexact) and leaf.aval.size > 1
        for leaf in whole.inputs
    ]
    return cut_program(whole.closed, whole.phases.of_eqn, inputs, trained, num_microbatches)


def _averaged(step: Step, num_microbatches: int, reasons: Sequence[str]) -> Program:
    """Return the step as a loop of gradient accumulation runs it: on each microbatch as if it were
    the whole batch, with the mean of every number that leaves, and the sum of every count.
    """
    assert step.batch_size is not None
    closed, _ = step.traced(step.batch_size // num_microbatches)
    whole = _classified(step, closed)
    inside = {
        var
        for eqn, phase in zip(open_jaxpr(whole.closed).eqns, whole.phases.of_eqn, strict=True)
        if phase != "update"
        for var in eqn.outvars
    }
    counts = {
        var: SUM if jnp.issubdtype(dtype_of(var), jnp.integer) else REPLICATED
        for var in inside - whole.placements.keys()
    }
    whole = evolve(whole, placements={**whole.placements, **counts})
    return evolve(_made(whole, num_microbatches), averaged=tuple(reasons))


def _made(whole: Whole, num_microbatches: int) -> Program:
    """Return a program that nothing will be cut from any more."""
    flat = FlatProgram(whole.closed, whole.phases.of_eqn, whole.placements, slice_of=whole.slice_of)
    flat = rewritten(flat, "planned")
    return Program(
        closed=flat.closed,
        inputs=whole.inputs,
        outputs=whole.outputs,
        aliases=whole.aliases,
        phases=evolve(whole.phases, of_eqn=flat.phases),
        placements=flat.placements,
        num_microbatches=num_microbatches,
        slices=whole.slices,
        slice_of=whole.slice_of,
    )


def _check_divides(step: Step, num_microbatches: int) -> None:
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
