"""NaN and infinity found before an update is applied: the schedule and programs of `on_nan`.

    runs      those whose results leave their microbatch also return whether these are finite
    meshes    each reduces the answers of its runs to the number of the first that is not
    agreement one mesh reduces these numbers, and sends the verdict to all
    updates   take the verdict, and give the old state back unless all runs were finite

All of it is instructions and programs like any others, so every runtime executes it, and nothing
waits for the host. Runs are numbered by microbatch, then in the order of execution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from attrs import evolve, frozen
from jax.sharding import NamedSharding

from alpa_interchange import Instruction, PipelineSchedule, TaskGraph
from alpa_meta.compat import dtype_of
from alpa_meta.errors import PlanError
from alpa_meta.execution.compiled_task import CompiledTask
from alpa_meta.execution.host_memory import placed
from alpa_meta.execution.tasks import build_tasks
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.spmd import partition_spec
from alpa_meta.types import Function
from mesh_runtime import check_schedule

if TYPE_CHECKING:
    from alpa_meta.execution.compiled_task import AnyMesh

VERDICT = "first run that is not finite"
"""The buffer of the verdict: the number of a run, or how many runs there are."""

_ANSWER = jax.ShapeDtypeStruct((), jnp.bool_)
_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
_IN_MICROBATCHES = ("forward", "backward", "backward_input", "backward_weight")


@frozen
class Finding:
    """A run of a step that gave NaN or infinity."""

    task: str
    microbatch: int


@frozen(kw_only=True)
class Reduction:
    """A program that finds the first run that is not finite: of runs by their answers, whose
    numbers are `numbers`, or (`numbers` is None) of what other reductions found."""

    mesh: int
    num_inputs: int
    numbers: tuple[int, ...] | None

    def function(self, num_runs: int) -> Function[tuple[jax.Array]]:
        """Return the program's function of scalars."""

        def of_answers(*finite: jax.Array) -> tuple[jax.Array]:
            numbers = jnp.asarray(self.numbers, jnp.int32)
            return (jnp.min(jnp.where(jnp.stack(finite), num_runs, numbers)).astype(jnp.int32),)

        def of_numbers(*numbers: jax.Array) -> tuple[jax.Array]:
            return (jnp.min(jnp.stack(numbers)),)

        return of_numbers if self.numbers is None else of_answers

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of what the function takes."""
        return [_NUMBER if self.numbers is None else _ANSWER] * self.num_inputs


@frozen(kw_only=True)
class Guard:
    """How the steps of a plan are guarded.

    `checked` are the positions of a task's results that are looked at, `updates` those of the
    results of an update that replace one of its operands, with its position. `runs` are (task,
    microbatch) by number; `received` are (mesh, buffer) of the scalars that meshes are sent.
    """

    schedule: PipelineSchedule
    checked: Mapping[str, tuple[int, ...]]
    updates: Mapping[str, tuple[tuple[int, int], ...]]
    runs: tuple[tuple[str, int], ...]
    reductions: Mapping[str, Reduction]
    received: tuple[tuple[int, str], ...]

    def compiled(self, task: CompiledTask) -> CompiledTask:
        """Return a task that also tells whether its results are finite, or an update that obeys the
        verdict; other tasks as they are."""
        name = task.task.spec.name
        if name in self.checked:
            run = _telling(task.run, self.checked[name])
            return evolve(task, run=run, returned=(_ANSWER,))
        if name in self.updates:
            run = _obeying(task, self.updates[name], len(self.runs))
            return evolve(task, run=run, given=(_NUMBER,))
        return task

    def finding(self, verdict: int) -> Finding | None:
        """Return what a verdict says."""
        return Finding(*self.runs[verdict]) if verdict < len(self.runs) else None


def with_update_apart(planned: Planned) -> Planned:
    """Return a plan with its update as a task of its own, which can be kept from being applied."""
    tasks = build_tasks(planned.program, planned.staging, update_apart=True)
    plan = evolve(planned.plan, tasks=tasks.graph)
    return evolve(planned, tasks=tasks, plan=plan)


def guard_of(planned: Planned, schedule: PipelineSchedule) -> Guard | None:
    """Return the guard of a plan with its update apart, None if nothing in it can be other than
    finite."""
    graph, carry = planned.tasks.graph, planned.tasks.carry
    leaving = _leaving(graph)
    checked: dict[str, tuple[int, ...]] = {}
    updates: dict[str, tuple[tuple[int, int], ...]] = {}
    for task in planned.tasks.tasks:
        spec = task.spec
        if spec.phase in _IN_MICROBATCHES:
            found = tuple(
                k
                for k, (name, var) in enumerate(zip(spec.outputs, task.outvars, strict=True))
                if name in leaving and jnp.issubdtype(dtype_of(var), jnp.inexact)
            )
            if found:
                checked[spec.name] = found
        elif spec.phase == "update":
            pairs = tuple(
                (k, spec.inputs.index(carry[name]))
                for k, name in enumerate(spec.outputs)
                if carry.get(name) in spec.inputs
            )
            if pairs:
                updates[spec.name] = pairs
    if not checked:
        return None
    return _guarded(schedule, checked, updates)


def _leaving(graph: TaskGraph) -> set[str]:
    """Return the values that an update reads or the step returns."""
    read = {name for task in graph.tasks if task.phase == "update" for name in task.inputs}
    return {*read, *graph.outputs}


def _telling(
    run: Function[tuple[jax.Array, ...]], positions: Sequence[int]
) -> Function[tuple[jax.Array, ...]]:
    def telling(*operands: jax.Array) -> tuple[jax.Array, ...]:
        results = run(*operands)
        answers = [jnp.all(jnp.isfinite(results[k])) for k in positions]
        return (*results, jnp.all(jnp.stack(answers)))

    telling.__name__ = run.__name__
    return telling


def _obeying(
    task: CompiledTask, pairs: Sequence[tuple[int, int]], num_runs: int
) -> Function[tuple[jax.Array, ...]]:
    names = task.task.spec.inputs

    def old(position: int, operand: jax.Array) -> jax.Array:
        if names[position] not in task.kinds:
            return operand
        spec = partition_spec(task.plan.inputs[position])
        assert task.jax_mesh is not None
        fetched: jax.Array = jax.device_put(operand, placed(task.jax_mesh, spec, "device"))
        return fetched

    def obeying(*given: jax.Array) -> tuple[jax.Array, ...]:
        *operands, verdict = given
        results = list(task.run(*operands))
        for result, operand in pairs:
            kept = old(operand, operands[operand])
            results[result] = jnp.where(verdict == num_runs, results[result], kept)
        return tuple(results)

    obeying.__name__ = task.run.__name__
    return obeying


# ---------------------------------------------------------------------- the schedule


def _guarded(
    schedule: PipelineSchedule,
    checked: Mapping[str, tuple[int, ...]],
    updates: Mapping[str, tuple[tuple[int, int], ...]],
) -> Guard:
    runs, answers = _numbered(schedule, checked)
    barriers = _barriers(schedule, updates)
    for (mesh, position), (task, microbatch) in answers.items():
        if position >= barriers[mesh]:
            raise PlanError(
                f"on_nan cannot guard this schedule: task {task!r} of microbatch {microbatch} runs "
                f"after an update on mesh {mesh}; leave on_nan out or choose another schedule"
            )
    number = {run: k for k, run in enumerate(runs)}
    own: list[list[tuple[str, int]]] = [[] for _ in schedule.programs]
    for (mesh, _), run in answers.items():
        own[mesh].append((_answer(*run), number[run]))
    asking = [mesh for mesh, found in enumerate(own) if found]
    told = [
        mesh
        for mesh, program in enumerate(schedule.programs)
        if mesh != asking[0] and any(one.task in updates for one in program)
    ]
    blocks, reductions, received = _blocks(own, asking, told)
    programs = []
    for mesh, program in enumerate(schedule.programs):
        made = [_with_scalars(one, checked, updates) for one in program]
        at = barriers[mesh]
        programs.append((*made[:at], *blocks[mesh], *made[at:]))
    return Guard(
        schedule=evolve(schedule, programs=tuple(programs)),
        checked=checked,
        updates=updates,
        runs=runs,
        reductions=reductions,
        received=received,
    )


def _numbered(
    schedule: PipelineSchedule, checked: Mapping[str, object]
) -> tuple[tuple[tuple[str, int], ...], dict[tuple[int, int], tuple[str, int]]]:
    """Return the runs that are checked by their number, and by (mesh, position)."""
    found: dict[tuple[int, int], tuple[str, int]] = {}
    for mesh, position in check_schedule(schedule).turns:
        one = schedule.programs[mesh][position]
        if one.kind == "run" and one.task in checked:
            found[mesh, position] = (one.task, one.microbatch or 0)
    return tuple(sorted(found.values(), key=lambda run: run[1])), found


def _answer(task: str, microbatch: int) -> str:
    return f"finite results of {task}@{microbatch}"


def _with_scalars(
    one: Instruction, checked: Mapping[str, object], updates: Mapping[str, object]
) -> Instruction:
    if one.kind == "run" and one.task in checked:
        return evolve(one, outputs=(*one.outputs, _answer(one.task, one.microbatch or 0)))
    if one.kind == "run" and one.task in updates:
        return evolve(one, inputs=(*one.inputs, VERDICT))
    return one


def _barriers(schedule: PipelineSchedule, updates: Mapping[str, object]) -> list[int]:
    """Return the position on each mesh before which the verdict is found.

    What comes after it are the updates and all that must: later instructions, receives of sends and
    sends of receives that do. So no message passes another between the same two meshes, and
    nothing before a barrier waits for what is behind one.
    """
    peers = _matching(schedule)
    barriers = [len(program) for program in schedule.programs]
    pending = [
        (mesh, position)
        for mesh, program in enumerate(schedule.programs)
        for position, one in enumerate(program)
        if one.kind == "run" and one.task in updates
    ]
    while pending:
        mesh, position = pending.pop()
        later = range(position, barriers[mesh])
        barriers[mesh] = min(barriers[mesh], position)
        pending += [peers[mesh, k] for k in later if (mesh, k) in peers]
    return barriers


def _matching(schedule: PipelineSchedule) -> dict[tuple[int, int], tuple[int, int]]:
    """Return for each send, by (mesh, position), its receive, and for each receive its send."""
    sends: dict[tuple[int, int], list[tuple[int, int]]] = {}
    receives: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for mesh, program in enumerate(schedule.programs):
        for position, one in enumerate(program):
            if one.kind == "send" and one.peer is not None:
                sends.setdefault((mesh, one.peer), []).append((mesh, position))
            elif one.kind == "receive" and one.peer is not None:
                receives.setdefault((one.peer, mesh), []).append((mesh, position))
    matching: dict[tuple[int, int], tuple[int, int]] = {}
    for channel, found in sends.items():
        for send, receive in zip(found, receives[channel], strict=True):
            matching[send], matching[receive] = receive, send
    return matching


def _blocks(
    own: Sequence[Sequence[tuple[str, int]]], asking: Sequence[int], told: Sequence[int]
) -> tuple[list[list[Instruction]], dict[str, Reduction], tuple[tuple[int, str], ...]]:
    """Return the instructions of each mesh at its barrier, the programs that they run, and the
    (mesh, buffer) of what is received.

    `own` are the answers on each mesh with their numbers, `asking` the meshes that have some, of
    which the first reduces what all found, `told` the other meshes that need the verdict.
    """
    blocks: list[list[Instruction]] = [[] for _ in own]
    reductions: dict[str, Reduction] = {}
    received: list[tuple[int, str]] = []
    hub = asking[0]

    def reduce(mesh: int, inputs: Sequence[str], numbers: tuple[int, ...] | None, to: str) -> None:
        name = f"finite.{mesh}" if numbers is not None else "finite"
        reductions[name] = Reduction(mesh=mesh, num_inputs=len(inputs), numbers=numbers)
        blocks[mesh].append(
            Instruction(kind="run", task=name, phase="update", inputs=tuple(inputs), outputs=(to,))
        )

    def send(source: int, target: int, name: str) -> None:
        blocks[source].append(Instruction(kind="send", inputs=(name,), peer=target))
        blocks[target].append(Instruction(kind="receive", outputs=(name,), peer=source))
        received.append((target, name))

    found = {mesh: f"{VERDICT} on mesh {mesh}" for mesh in asking}
    for mesh in asking:
        names = [name for name, _ in own[mesh]]
        numbers = tuple(number for _, number in own[mesh])
        reduce(mesh, names, numbers, VERDICT if len(asking) == 1 else found[mesh])
    for mesh in asking[1:]:
        send(mesh, hub, found[mesh])
    if len(asking) > 1:
        reduce(hub, list(found.values()), None, VERDICT)
    for mesh in told:
        send(hub, mesh, VERDICT)
    return blocks, reductions, tuple(received)


def scalar_layouts(guard: Guard, meshes: Sequence[AnyMesh]) -> list[dict[str, NamedSharding]]:
    """Return the layouts of the scalars that each mesh receives: whole on every device."""
    layouts: list[dict[str, NamedSharding]] = [{} for _ in meshes]
    for mesh, name in guard.received:
        layouts[mesh][name] = NamedSharding(meshes[mesh], jax.sharding.PartitionSpec())
    return layouts
