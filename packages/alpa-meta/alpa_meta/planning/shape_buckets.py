"""Shape buckets: a batch that differs from a planned one in marked dims only takes its choices.

    marked dims   a pytree prefix of the batch: a dim, a set of dims, or None per leaf
    origin        a step that was planned by a search; its choices serve the buckets that follow
    taken over    the new step is traced, compared with the origin operation by operation, and given
                  the origin's stages, microbatch count and strategies by name; time and memory are
                  predicted anew. State keeps its placement, so one state serves all such buckets.

What does not fit (another structure, a size that a sharding does not divide, too much memory) is
planned afresh and becomes an origin itself; the user is told why.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from attrs import evolve, frozen

import ilp_sharding
from alpa_interchange import ParallelPlan, ShardingSolution, StageCandidate
from alpa_meta.compat import Atom, ClosedJaxpr, Jaxpr, Literal, Var, open_jaxpr, shape_of, subjaxprs
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.meshes import usable_memory
from alpa_meta.inter_op.scan_stages import cut_evenly
from alpa_meta.intra_op.selection import Selection
from alpa_meta.options import Options
from alpa_meta.planning.chosen_plan import Planned, finish
from alpa_meta.planning.outlooks import staged_outlook
from alpa_meta.step.batch_dims import moved_by_path, moved_dim
from alpa_meta.step.program import Program, Step
from alpa_meta.types import PyTree
from cost_model import calibrated_model

if TYPE_CHECKING:
    from alpa_interchange import StageSharding

_LOG = logging.getLogger("alpa_meta")


class MisfitError(PlanError):
    """The choices of a plan do not fit another batch; the message says why."""


@frozen(eq=False)
class Bucket:
    """One set of batch shapes: its plan, and why it was not taken over where it could have been.

    `shapes` maps the path of each batch array to its shape; `taken_over` says that the plan's
    choices are those of an earlier bucket.
    """

    shapes: Mapping[str, tuple[int, ...]]
    plan: ParallelPlan
    taken_over: bool = False
    reason: str = ""

    def __str__(self) -> str:
        sizes = ", ".join(f"{path} {list(shape)}" for path, shape in self.shapes.items())
        origin = "choices taken over" if self.taken_over else "planned"
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"{sizes}: {origin}{why}, predicted {1e3 * self.plan.step_seconds:.3g} ms per step and "
            f"{1e-6 * max(self.plan.device_bytes):.3g} MB per device"
        )


class Buckets:
    """The plans of one step for batches of different shapes, in the order they were made."""

    def __init__(self) -> None:
        self._origins: list[tuple[Step, Planned]] = []
        self.made: list[Bucket] = []

    def add_origin(self, step: Step, planned: Planned) -> None:
        """Let the choices of `planned` serve the steps that follow."""
        self._origins.append((step, planned))

    def planned(self, step: Step, options: Options, search: Callable[[Step], Planned]) -> Planned:
        """Return the plan for `step`: an earlier one's choices where they fit, else by `search`."""
        marked = marked_dims(options.dynamic_dims, step)
        reason = ""
        for known, planned in self._origins:
            try:
                _check_marked(known, step, marked)
                found = taken_over(planned, known, step, options)
            except MisfitError as error:
                reason = reason or str(error)
                continue
            self._note(step, found, Bucket({}, found.plan, taken_over=True))
            return found
        if reason:
            warnings.warn(
                f"this batch is planned afresh, and state may have to move: {reason}", stacklevel=4
            )
        found = search(step)
        self.add_origin(step, found)
        self._note(step, found, Bucket({}, found.plan, reason=reason))
        return found

    def _note(self, step: Step, planned: Planned, bucket: Bucket) -> None:
        shapes = {leaf.path: leaf.aval.shape for leaf in step.leaves if leaf.role == "batch"}
        self.made.append(evolve(bucket, shapes=shapes))
        _LOG.info("%s", self.made[-1])


def at_planned_shapes(step: Step, plan: ParallelPlan) -> Step:
    """Return `step` for batches of the shapes that `plan` was made for."""
    shapes = {item.path: item.shape for item in plan.program.inputs if item.role == "batch"}
    args = list(step.args)
    for number in step.batch_arguments:
        leaves, tree = jax.tree.flatten(args[number])
        paths = step.paths_of([number])
        resized = [
            jax.ShapeDtypeStruct(shapes[path], leaf.dtype) if path in shapes else leaf
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        args[number] = jax.tree.unflatten(tree, resized)
    return step.with_arguments(tuple(args))


def marked_dims(prefix: PyTree, step: Step) -> dict[str, frozenset[int]]:
    """Return the dims that may vary of each batch array, by path.

    `prefix` is a pytree prefix of the batch argument, of the tuple of them if there are several.
    """
    arguments = step.batch_arguments
    batch = tuple(step.args[number] for number in arguments)
    tree = batch[0] if len(batch) == 1 else batch
    try:
        marks = jax.tree.broadcast(prefix, tree, is_leaf=_is_mark)
    except ValueError as error:
        raise PlanError(f"dynamic_dims must be a pytree prefix of the batch: {error}") from None
    leaves = jax.tree.leaves(marks, is_leaf=_is_mark)
    paths, first = step.paths_of(arguments), moved_by_path(step)
    return {
        path: frozenset(
            moved_dim(dim, first.get(path, 0))
            for dim in _dims(mark, path, len(getattr(leaf, "shape", ())))
        )
        for path, leaf, mark in zip(paths, jax.tree.leaves(tree), leaves, strict=True)
    }


def _is_mark(mark: object) -> bool:
    return mark is None or isinstance(mark, (int, set, frozenset))


def _dims(mark: object, path: str, rank: int) -> frozenset[int]:
    if mark is None:
        return frozenset()
    given: Collection[PyTree] = mark if isinstance(mark, (set, frozenset)) else (mark,)
    for dim in given:
        if not isinstance(dim, int) or not -rank <= dim < rank:
            raise PlanError(
                f"dynamic_dims must name dims of the array they stand for, got {dim!r} for {path}, "
                f"which has {rank} dims; give a dim, a set of dims or None"
            )
    return frozenset(dim % rank for dim in given)


def _check_marked(known: Step, step: Step, marked: Mapping[str, frozenset[int]]) -> None:
    """Raise MisfitError unless the arguments of two steps differ in marked dims only."""
    if [leaf.path for leaf in known.leaves] != [leaf.path for leaf in step.leaves]:
        raise MisfitError("the arguments have another structure")
    for one, two in zip(known.leaves, step.leaves, strict=True):
        here, there = one.aval, two.aval
        if here.dtype != there.dtype or len(here.shape) != len(there.shape):
            raise MisfitError(
                f"{two.path} is {there.dtype}{list(there.shape)}, planned was "
                f"{here.dtype}{list(here.shape)}"
            )
        for dim, (planned, given) in enumerate(zip(here.shape, there.shape, strict=True)):
            if planned != given and dim not in marked.get(two.path, ()):
                raise MisfitError(
                    f"dim {dim} of {two.path} is {given} instead of {planned}, and dynamic_dims "
                    "does not mark it"
                )


def taken_over(planned: Planned, known: Step, step: Step, options: Options) -> Planned:
    """Return the plan for `step` that makes the choices of `planned`, which was made for `known`.

    Raises MisfitError where they do not fit. The plan's `lower_bound` is 0: nothing was searched.
    """
    plan = planned.plan
    count = plan.num_microbatches
    if count not in step.microbatch_counts:
        size = step.batch_size
        why = f"which do not divide {size} examples" if size else f"but {step.uncut}"
        raise MisfitError(f"the plan has {count} microbatches, {why}")
    program = step.program(count)
    if options.exact and count > 1 and program.inexact:
        raise MisfitError(f"{count} microbatches would change the result: {program.inexact[0]}")
    like = _layered_program(known, plan)
    difference = structural_difference(like, _layered_program(step, plan))
    if difference:
        raise MisfitError(f"the step is another program for this batch: {difference}")
    outlook, layering = staged_outlook(step, plan, options, like)
    starts = [stage.candidate.layer_start for stage in plan.stage_plan.stages]

    def choose(candidate: StageCandidate, selection: Selection, _: float) -> ShardingSolution:
        return _same_choice(planned, starts.index(candidate.layer_start), selection)

    model = calibrated_model(plan.cluster)
    found = finish(plan.stage_plan, outlook, layering, 0.0, step, model, options, choose)
    if not isinstance(found, Planned):
        raise MisfitError(
            f"its stages need {found.bytes:,.0f} bytes per device more than there are"
        )
    for stage, (old, new) in enumerate(zip(plan.shardings, found.plan.shardings, strict=True)):
        room = usable_memory(plan.cluster, new.mesh.submesh.host_group, options.memory)
        needed = found.plan.device_bytes[stage]
        if needed > max(room, plan.device_bytes[stage]):
            raise MisfitError(
                f"stage {stage} needs {needed:,.0f} bytes per device, {room:,.0f} are there"
            )
        if any(old.state_specs[leaf] != new.state_specs.get(leaf) for leaf in _state(step, old)):
            raise MisfitError(f"state of stage {stage} would have to be laid out anew")
    return found


def _layered_program(step: Step, plan: ParallelPlan) -> Program:
    """Return the program whose layers the stages of `plan` are made of."""
    program = step.program(plan.num_microbatches)
    cut = cut_evenly(program) if plan.num_stages > 1 else None
    return program if cut is None else cut.program


def _state(step: Step, sharding: StageSharding) -> list[str]:
    return [
        leaf.path
        for leaf in step.leaves
        if leaf.role == "state" and leaf.path in sharding.state_specs
    ]


def _same_choice(planned: Planned, stage: int, selection: Selection) -> ShardingSolution:
    """Return the solution that takes the planned stage's strategy, by name, for every node.

    Where no size divides any more, an operator has no partial sums and the node of their completion
    ("sum") is left out.
    """
    before, after = planned.selections[stage].problem, selection.problem
    wanted = planned.plan.shardings[stage].solution.choice or ()
    choice: list[int] = []
    for node, (kind, chosen) in enumerate(zip(before.node_names, wanted, strict=True)):
        place = len(choice)
        here = after.node_names[place] if place < len(after.node_names) else ""
        if here != kind and kind == "sum":
            continue
        if here != kind:
            raise MisfitError(
                f"choice {node} of stage {stage} is for {here or 'nothing'}, not {kind}"
            )
        name = before.strategy_names[node][chosen]
        if name not in after.strategy_names[place]:
            raise MisfitError(
                f"{kind} cannot be sharded as {name}: its dims are not divisible for this batch"
            )
        choice.append(after.strategy_names[place].index(name))
    if len(choice) != len(after.node_names):
        raise MisfitError(f"stage {stage} has {len(after.node_names)} choices, not {len(choice)}")
    judged = ilp_sharding.check(evolve(after, memory_limit=None), choice)
    if judged.forbidden:
        raise MisfitError(f"stage {stage} would need a conversion that does not exist")
    return ShardingSolution(
        choice=tuple(choice),
        objective=float(judged.cost),
        lower_bound=None,
        status="feasible",
        seconds=0.0,
        solver="taken over",
    )


def structural_difference(one: Program, two: Program) -> str:
    """Return the first way in which two programs differ other than in sizes, or an empty string."""
    found = _jaxprs_differ(one.closed, two.closed)
    if not found and one.phases.of_eqn != two.phases.of_eqn:
        return "other operations belong to the forward pass, the backward pass or the update"
    return found


def _jaxprs_differ(one: Jaxpr | ClosedJaxpr, two: Jaxpr | ClosedJaxpr) -> str:
    first, second = open_jaxpr(one), open_jaxpr(two)
    if len(first.eqns) != len(second.eqns):
        return f"{len(second.eqns)} operations instead of {len(first.eqns)}"
    places: list[dict[Var, int]] = [{}, {}]

    def kinds(atoms: Sequence[Atom], side: int) -> list[tuple[int | None, str, int]]:
        return [
            (
                None
                if isinstance(atom, Literal)
                else places[side].setdefault(atom, len(places[side])),
                str(getattr(atom.aval, "dtype", "")),
                len(shape_of(atom)),
            )
            for atom in atoms
        ]

    if kinds(first.invars, 0) != kinds(second.invars, 1):
        return "other inputs"
    for number, (eqn, twin) in enumerate(zip(first.eqns, second.eqns, strict=True)):
        names = eqn.primitive.name, twin.primitive.name
        if names[0] != names[1]:
            return f"operation {number} is {names[1]} instead of {names[0]}"
        wired = kinds(eqn.invars, 0) == kinds(twin.invars, 1)
        if not wired or kinds(eqn.outvars, 0) != kinds(twin.outvars, 1):
            return f"operation {number}, {names[0]}, works on other values"
        bodies, twins = subjaxprs(eqn), subjaxprs(twin)
        if len(bodies) != len(twins):
            return f"operation {number}, {names[0]}, has another body"
        for (_, body), (_, other) in zip(bodies, twins, strict=True):
            inner = _jaxprs_differ(body, other)
            if inner:
                return f"in the body of {names[0]}, {inner}"
    if kinds(first.outvars, 0) != kinds(second.outvars, 1):
        return "other results"
    return ""
