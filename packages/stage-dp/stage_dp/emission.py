"""Instruction emission: from the tasks of a training step to one static list per mesh.

The tasks are put into one global sequence: start tasks, the statistics of every microbatch, then
the schedule's forwards and backwards by start time, then update tasks by dependency. Each mesh runs
its part of that sequence in order, so runs alone can never wait for each other in a circle.
-> _sequence()

A buffer read away from the mesh that holds it is sent right after the run that wrote it (an input:
at the start of the step) and received once, `late`: just before the first run that reads it, or
`early`: where the global sequence has the send. Receives from one peer keep the order of its sends;
a late receive moves forward where a later one of that peer is needed first. -> _place()

`late` needs sends that do not block. With `early` every transfer is one event of the global
sequence, so the programs cannot block each other even if a send waits for its receive; early
receives are also what lets an eager schedule overlap transfers with compute, at the price of
buffers held longer.

An input that exists once per microbatch, a leaf of the batch, is never sent: every mesh that reads
it is given it before the step. -> _held_inputs()
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from attrs import define, field, frozen

from alpa_interchange import ParallelPlan
from alpa_interchange.schedule import Instruction, PipelineSchedule, TaskGraph, TaskSpec
from stage_dp.schedules import SCHEDULE_RULES, Step, order

STAGED_PHASES = ("forward", "backward", "backward_input", "backward_weight")
PHASES_OF_STEP = {
    "forward": ("forward",),
    "backward": ("backward", "backward_input", "backward_weight"),
    "backward_input": ("backward", "backward_input"),
    "backward_weight": ("backward_weight",),
}
"""By phase of a step of the schedule: the phases of the tasks it runs. A backward in one task runs
where the previous stage may wait for it."""

MAX_BUFFERS = 1 << 25
"""Buffers that the instructions of a plan may read and write: 1 GB of lists. GPT-1.3B in 512
microbatches has 0.7 million, a GPT of 96 layers in 1,536 some 10 million."""


@frozen
class _Run:
    """One run of a task; `position` in the global sequence, buffers under their final names."""

    position: int
    task: TaskSpec
    microbatch: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@frozen
class _Transfer:
    """One buffer from `source` to `target`, produced by `run` (None: an input of the step)."""

    buffer: str
    source: int
    target: int
    run: _Run | None
    reader: _Run


@define
class _Program:
    """What one mesh does around each of its runs, by position of the run in the global sequence."""

    runs: list[_Run] = field(factory=list)
    before: dict[int, list[_Transfer]] = field(factory=lambda: defaultdict(list))
    after: dict[int, list[_Transfer]] = field(factory=lambda: defaultdict(list))


def instruction_lists(plan: ParallelPlan) -> PipelineSchedule:
    """Return the instruction list of each mesh for one step of `plan`; those written in plans of
    schema 0.1 and 0.2."""
    if plan.tasks is None:
        assert plan.schedule is not None  # a plan has one of them
        return plan.schedule
    chosen, count = plan.stage_plan, plan.num_microbatches
    buffers = sum(len(task.inputs) + len(task.outputs) for task in plan.tasks.tasks) * count
    if buffers > MAX_BUFFERS:
        raise ValueError(
            f"the plan's {len(plan.tasks.tasks)} tasks in {count} microbatches make instructions "
            f"of {buffers} buffers; at most {MAX_BUFFERS} are listed, so plan with fewer "
            "microbatches"
        )
    rule = SCHEDULE_RULES.get(chosen.schedule)
    # an evaluation may have nothing to run in the last of the stages that in_flight counts
    own = rule is not None and (rule.interleaves or not rule.has_backward)
    given = None if own else chosen.in_flight or None
    return emit(plan.tasks, chosen.schedule, count, warmups=given, least_meshes=chosen.num_meshes)


def emit(
    graph: TaskGraph,
    schedule_name: str,
    num_microbatches: int,
    *,
    warmups: Sequence[int] | None = None,
    receive: str | None = None,
    free_donated: bool = False,
    least_meshes: int = 1,
) -> PipelineSchedule:
    """Return the instruction list of each mesh for one step of `graph`.

    `warmups` [stages] is handed to the schedule ("adaptive" needs it: `StagePlan.in_flight`).
    `receive` is "late" or "early"; by default early for "eager-1f1b" and "adaptive". A graph
    without backward tasks runs its forwards only; tasks whose schedule splits the backward have the
    phases "backward_input" and "backward_weight". Inputs that are not per step stand for one buffer
    per microbatch on every mesh that reads them, such outputs for one on the mesh that writes them.
    `free_donated` adds frees of donated inputs, for runtimes that keep a reference to a buffer its
    run has consumed. Of `least_meshes` at least there is a list, be it empty: an evaluation may
    have nothing to run on the last ones.
    """
    if receive is None:
        rule = SCHEDULE_RULES.get(schedule_name)
        receive = "early" if rule is not None and rule.receives_early else "late"
    if receive not in ("early", "late"):
        raise ValueError(f'receive must be "early" or "late", got {receive!r}')
    staged = [task for task in graph.tasks if task.phase in STAGED_PHASES]
    num_stages = 1 + max((task.stage for task in staged), default=0)
    named = [task.mesh + 1 for task in graph.tasks] + [mesh + 1 for mesh in graph.home]
    num_meshes = max([least_meshes, *named])
    runs = _sequence(graph, schedule_name, num_stages, num_meshes, num_microbatches, warmups)
    held = _held_inputs(graph, num_microbatches, runs)
    wanted = _buffers_of(graph.outputs, graph, num_microbatches)
    transfers = _transfers(runs, held, set(wanted))
    _check_outputs(wanted, runs, held)
    programs = [_Program() for _ in range(num_meshes)]
    for run in runs:
        programs[run.task.mesh].runs.append(run)
    _place(transfers, programs, receive)
    return PipelineSchedule(
        name=schedule_name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        programs=tuple(
            _with_frees(
                _moves_and_runs(mesh, program),
                program,
                [buffer for buffer, meshes in held.items() if mesh in meshes],
                wanted,
                free_donated,
            )
            for mesh, program in enumerate(programs)
        ),
    )


def _sequence(
    graph: TaskGraph,
    schedule_name: str,
    num_stages: int,
    num_meshes: int,
    num_microbatches: int,
    warmups: Sequence[int] | None,
) -> list[_Run]:
    by_step: dict[tuple[str, int, int], list[TaskSpec]] = defaultdict(list)
    mesh_of: dict[int, int] = {}
    for task in graph.tasks:
        if task.phase in STAGED_PHASES:
            by_step[task.phase, task.stage, task.slice_index].append(task)
            if mesh_of.setdefault(task.stage, task.mesh) != task.mesh:
                raise ValueError(
                    f"task {task.name!r} runs stage {task.stage} on mesh {task.mesh}, but other "
                    f"tasks of that stage run on mesh {mesh_of[task.stage]}; a stage has one mesh"
                )
    steps: tuple[Step, ...] = ()
    rule = SCHEDULE_RULES.get(schedule_name)
    if rule is not None and not rule.has_backward:
        backward = [t.name for t in graph.tasks if t.phase in STAGED_PHASES[1:]]
        if backward:
            raise ValueError(
                f"schedule {schedule_name!r} runs no backward, but the graph has the tasks "
                f"{backward[:8]}; leave them out or take another schedule"
            )
    if by_step:
        interleaves = rule is not None and rule.interleaves
        if interleaves:
            # Stages may have nothing to run, as where layers read constants only.
            num_stages = math.ceil(num_stages / num_meshes) * num_meshes
            homes: dict[int, int] = {}
            if any(homes.setdefault(s % num_meshes, m) != m for s, m in mesh_of.items()):
                raise ValueError(
                    f"{schedule_name} needs stage s on the mesh of stage s mod {num_meshes}, "
                    f"got meshes {[mesh_of.get(s) for s in range(num_stages)]}"
                )
        schedule = order(
            schedule_name,
            num_stages,
            num_microbatches,
            num_meshes=num_meshes if interleaves else None,
            warmups=warmups,
            num_slices=1 + max(place for _, _, place in by_step),
        )
        steps = schedule.global_order()
    per_step = set(graph.per_step)
    runs: list[_Run] = []

    def add(task: TaskSpec, microbatch: int | None) -> None:
        runs.append(
            _Run(
                len(runs),
                task,
                microbatch,
                tuple(_buffer(v, microbatch, per_step, task) for v in task.inputs),
                tuple(_buffer(v, microbatch, per_step, task) for v in task.outputs),
            )
        )

    for task in _by_dependency([t for t in graph.tasks if t.phase == "start"]):
        add(task, None)
    before = [t for t in graph.tasks if t.phase == "statistics"]
    for microbatch in range(num_microbatches if before else 0):
        for task in _by_dependency(before):
            add(task, microbatch)
    ordered: dict[tuple[str, int, int], list[TaskSpec]] = {}
    for step in steps:
        key = step.phase, step.stage, step.slice_index
        if key not in ordered:
            phases = PHASES_OF_STEP[step.phase]
            ordered[key] = _by_dependency(
                [t for p in phases for t in by_step[p, step.stage, step.slice_index]]
            )
        for task in ordered[key]:
            add(task, step.microbatch)
    for task in _by_dependency([t for t in graph.tasks if t.phase == "update"]):
        add(task, None)
    return runs


def _by_dependency(tasks: Sequence[TaskSpec]) -> list[TaskSpec]:
    """Return `tasks` so that writers come before readers, else in the order given.

    A value updated in place is read and written in the order given.
    """
    writers: dict[str, list[int]] = defaultdict(list)
    for k, task in enumerate(tasks):
        for value in task.outputs:
            writers[value].append(k)
    before: list[set[int]] = [set() for _ in tasks]
    for k, task in enumerate(tasks):
        for value in {*task.inputs, *task.outputs}:
            for writer in writers[value]:
                in_place = value in tasks[writer].inputs
                if writer == k:
                    continue
                if writer < k or (value in task.inputs and not in_place):
                    before[k].add(writer)
                else:
                    before[writer].add(k)
    result: list[TaskSpec] = []
    done: set[int] = set()
    while len(done) < len(tasks):
        ready = next((k for k in range(len(tasks)) if k not in done and before[k] <= done), None)
        if ready is None:
            names = [task.name for k, task in enumerate(tasks) if k not in done]
            raise ValueError(f"tasks {names} read each other's outputs in a circle")
        done.add(ready)
        result.append(tasks[ready])
    return result


def _buffer(value: str, microbatch: int | None, per_step: set[str], task: TaskSpec) -> str:
    if value in per_step:
        return value
    if microbatch is None:
        raise ValueError(
            f"{task.phase} task {task.name!r} runs once per step but uses {value!r}, which exists "
            "once per microbatch; accumulate it in a per-step value or list it in per_step"
        )
    return f"{value}@{microbatch}"


def _buffers_of(values: Sequence[str], graph: TaskGraph, num_microbatches: int) -> list[str]:
    per_step = set(graph.per_step)
    return [
        buffer
        for value in values
        for buffer in (
            [value] if value in per_step else [f"{value}@{m}" for m in range(num_microbatches)]
        )
    ]


def _held_inputs(
    graph: TaskGraph, num_microbatches: int, runs: Sequence[_Run]
) -> dict[str, tuple[int, ...]]:
    """Return the meshes that each input is on before the step, its home first: one that exists once
    per step on its home, one per microbatch wherever it is read."""
    per_step = set(graph.per_step)
    readers: dict[str, dict[int, None]] = defaultdict(dict)
    for run in runs:
        for buffer in run.inputs:
            readers[buffer][run.task.mesh] = None
    homes: dict[str, int] = {}
    held: dict[str, tuple[int, ...]] = {}
    for value, mesh in zip(graph.inputs, graph.home, strict=True):
        if homes.setdefault(value, mesh) != mesh:
            raise ValueError(
                f"input {value!r} has homes on meshes {homes[value]} and {mesh}; list it once, "
                "other meshes receive it"
            )
        for buffer in _buffers_of([value], graph, num_microbatches):
            own = (mesh,) if value in per_step else tuple(sorted(readers[buffer]))
            held[buffer] = own or (mesh,)
    return held


def _transfers(
    runs: list[_Run], held: Mapping[str, Sequence[int]], wanted: set[str]
) -> list[_Transfer]:
    """Return what must move, in the order of the sends, each once, with its first reader."""
    location = {buffer: meshes[0] for buffer, meshes in held.items()}
    written: dict[str, _Run | None] = dict.fromkeys(held)
    copies: dict[tuple[str, int], _Run | None] = {
        (buffer, mesh): None for buffer, meshes in held.items() for mesh in meshes[1:]
    }
    consumed: dict[tuple[str, int], _Run] = {}
    transfers: list[_Transfer] = []
    for run in runs:
        mesh = run.task.mesh
        for buffer in run.inputs:
            if buffer not in location:
                raise ValueError(
                    f"task {run.task.name!r} reads {buffer!r}, which is no input and which no "
                    "earlier task writes"
                )
            if (buffer, mesh) in consumed:
                raise ValueError(
                    f"task {run.task.name!r} reads {buffer!r} after task "
                    f"{consumed[buffer, mesh].task.name!r} consumed it; do not donate it there"
                )
            if location[buffer] == mesh:
                continue
            if (buffer, mesh) not in copies:
                copies[buffer, mesh] = written[buffer]
                transfers.append(
                    _Transfer(buffer, location[buffer], mesh, written[buffer], reader=run)
                )
            elif copies[buffer, mesh] is not written[buffer]:
                raise ValueError(
                    f"task {run.task.name!r} on mesh {mesh} reads {buffer!r} again after it "
                    f"changed on mesh {location[buffer]}; give the new value another name"
                )
        for value, buffer in zip(run.task.inputs, run.inputs, strict=True):
            if value in run.task.donated and buffer not in run.outputs:
                if buffer in wanted and location[buffer] == mesh:
                    raise ValueError(
                        f"task {run.task.name!r} consumes {buffer!r}, an output of the step"
                    )
                consumed[buffer, mesh] = run
        for buffer in run.outputs:
            if buffer in location and (location[buffer] != mesh or buffer not in run.inputs):
                raise ValueError(
                    f"task {run.task.name!r} on mesh {mesh} writes {buffer!r}, which exists "
                    f"already on mesh {location[buffer]}; only a value in its inputs on the same "
                    "mesh can be written again (in place)"
                )
            location[buffer] = mesh
            written[buffer] = run
    transfers.sort(key=lambda t: -1 if t.run is None else t.run.position)
    return transfers


def _check_outputs(wanted: list[str], runs: list[_Run], held: Iterable[str]) -> None:
    exists = {*held, *(buffer for run in runs for buffer in run.outputs)}
    missing = [buffer for buffer in wanted if buffer not in exists]
    if missing:
        raise ValueError(f"TaskGraph.outputs {missing[:8]} are no inputs and no task writes them")


def _place(transfers: list[_Transfer], programs: list[_Program], receive: str) -> None:
    """Attach each send after its run and each receive before or after a run (-1: the beginning)."""
    positions = [[run.position for run in program.runs] for program in programs]
    by_pair: dict[tuple[int, int], list[_Transfer]] = defaultdict(list)
    for transfer in transfers:
        sent = -1 if transfer.run is None else transfer.run.position
        target = transfer.target
        programs[transfer.source].after[sent].append(transfer)
        if receive == "late":
            by_pair[transfer.source, target].append(transfer)
        elif sent < 0:
            programs[target].after[sent].append(transfer)
        else:
            following = positions[target][bisect_right(positions[target], sent)]
            programs[target].before[following].append(transfer)
    for (_, target), sequence in sorted(by_pair.items()):
        needed = sequence[-1].reader.position
        placed: list[tuple[int, _Transfer]] = []
        for transfer in reversed(sequence):
            needed = min(transfer.reader.position, needed)
            placed.append((needed, transfer))
        for position, transfer in reversed(placed):
            programs[target].before[position].append(transfer)


def _moves_and_runs(mesh: int, program: _Program) -> list[Instruction]:
    result = [_moving(mesh, transfer) for transfer in program.after[-1]]
    for run in program.runs:
        result.extend(_moving(mesh, transfer) for transfer in program.before[run.position])
        result.append(
            Instruction(
                kind="run",
                task=run.task.name,
                phase=run.task.phase,
                stage=run.task.stage,
                microbatch=run.microbatch,
                slice_index=run.task.slice_index,
                inputs=run.inputs,
                outputs=run.outputs,
            )
        )
        result.extend(_moving(mesh, transfer) for transfer in program.after[run.position])
    return result


def _moving(mesh: int, transfer: _Transfer) -> Instruction:
    """Return the send or the receive of `transfer`, whichever `mesh` does.

    A send bears the name of the task that wrote the buffer, a receive that of its first reader.
    """
    sending = transfer.source == mesh
    cause = (transfer.run or transfer.reader) if sending else transfer.reader
    return Instruction(
        kind="send" if sending else "receive",
        task=cause.task.name,
        phase=cause.task.phase,
        stage=cause.task.stage,
        microbatch=cause.microbatch,
        slice_index=cause.task.slice_index,
        inputs=(transfer.buffer,) if sending else (),
        outputs=() if sending else (transfer.buffer,),
        peer=transfer.target if sending else transfer.source,
    )


def _with_frees(
    instructions: list[Instruction],
    program: _Program,
    held: list[str],
    wanted: list[str],
    free_donated: bool,
) -> tuple[Instruction, ...]:
    """Return `instructions` with every buffer dropped after its last use on this mesh."""
    tasks = {run.task.name: run.task for run in program.runs}
    received = {b for i in instructions if i.kind == "receive" for b in i.outputs}
    keep = {buffer for buffer in wanted if buffer not in received}
    last: dict[str, int] = dict.fromkeys(held, -1)
    consumed: set[str] = set()
    for at, instruction in enumerate(instructions):
        for buffer in (*instruction.inputs, *instruction.outputs):
            last[buffer] = at
        if instruction.kind == "run" and not free_donated:
            task = tasks[instruction.task]
            for value, buffer in zip(task.inputs, instruction.inputs, strict=True):
                if value in task.donated and buffer not in instruction.outputs:
                    consumed.add(buffer)
    dead: dict[int, list[str]] = defaultdict(list)
    for buffer, at in last.items():
        if buffer not in keep and buffer not in consumed:
            dead[at].append(buffer)
    result: list[Instruction] = []
    for at in range(-1, len(instructions)):
        if at >= 0:
            result.append(instructions[at])
        if dead.get(at):
            near = instructions[at] if at >= 0 else None
            result.append(
                Instruction(
                    kind="free",
                    task=near.task if near else "",
                    phase=near.phase if near else "",
                    stage=near.stage if near else 0,
                    microbatch=near.microbatch if near else None,
                    slice_index=near.slice_index if near else 0,
                    inputs=tuple(dead[at]),
                )
            )
    return tuple(result)
