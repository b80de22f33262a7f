"""Emitted programs define what they read, free what they make, and never wait for each other."""

from collections import Counter, defaultdict, deque

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange import (
    ClusterSpec,
    DeviceMesh,
    DeviceSpec,
    HostGroup,
    LinkSpec,
    LogicalMesh,
    MeshAxis,
    ParallelPlan,
    PlacedStage,
    ProgramSummary,
    ShardingSolution,
    StageCandidate,
    StagePlan,
    StageSharding,
    SubmeshSpec,
    from_json,
    to_json,
)
from alpa_interchange.schedule import TaskGraph, TaskSpec
from stage_dp import SCHEDULE_RULES, SCHEDULES, adaptive_warmups, emit, instruction_lists, order

TRAINING = [name for name in SCHEDULES if SCHEDULE_RULES[name].has_backward]


def interpret(graph, schedule, num_microbatches, *, blocking_sends=False):
    """Run the programs of `schedule` on sets of buffer names; returns what is left on each mesh.

    Asserts that every read is defined, nothing is overwritten but in place, donated buffers are
    gone, and sends and receives of each ordered pair of meshes match in order. With
    `blocking_sends` a send waits until its receive is the next instruction of the peer.
    """
    tasks = {task.name: task for task in graph.tasks}
    per_step = set(graph.per_step)
    alive: list[set[str]] = [set() for _ in schedule.programs]
    for value, mesh in zip(graph.inputs, graph.home, strict=True):
        names = [value] if value in per_step else [f"{value}@{m}" for m in range(num_microbatches)]
        readers = {task.mesh for task in graph.tasks if value in task.inputs}
        for one in {mesh} if value in per_step else readers or {mesh}:
            alive[one].update(names)
    wires: defaultdict[tuple[int, int], deque[str]] = defaultdict(deque)
    at = [0] * len(schedule.programs)

    def step(mesh):
        instruction = schedule.programs[mesh][at[mesh]]
        assert set(instruction.inputs) <= alive[mesh], (mesh, instruction)
        if instruction.kind == "run":
            task = tasks[instruction.task]
            assert task.mesh == mesh
            assert len(instruction.inputs) == len(task.inputs)
            donated = {
                b for v, b in zip(task.inputs, instruction.inputs, strict=True) if v in task.donated
            }
            alive[mesh] -= donated | set(instruction.inputs) & set(instruction.outputs)
            assert not alive[mesh] & set(instruction.outputs), (mesh, instruction)
            alive[mesh] |= set(instruction.outputs)
        elif instruction.kind == "send":
            if blocking_sends:
                peer = schedule.programs[instruction.peer]
                other = peer[at[instruction.peer]] if at[instruction.peer] < len(peer) else None
                if other is None or other.kind != "receive" or other.peer != mesh:
                    return False
                if wires[mesh, instruction.peer]:
                    return False
                assert other.outputs == instruction.inputs
            wires[mesh, instruction.peer].append(instruction.inputs[0])
        elif instruction.kind == "receive":
            wire = wires[instruction.peer, mesh]
            if not wire:
                return False
            assert wire.popleft() == instruction.outputs[0]
            assert not alive[mesh] & set(instruction.outputs)
            alive[mesh] |= set(instruction.outputs)
        else:
            alive[mesh] -= set(instruction.inputs)
        at[mesh] += 1
        return True

    moved = True
    while moved:
        moved = False
        for mesh, program in enumerate(schedule.programs):
            while at[mesh] < len(program) and step(mesh):
                moved = True
    stuck = [p[k] for p, k in zip(schedule.programs, at, strict=True) if k < len(p)]
    assert not stuck, f"deadlock at {stuck}"
    assert not any(wires.values())
    return alive


def training_graph(num_stages, mesh_of, *, tied=False, skip=False, clip=True, split=False):
    """Return a training step; optionally tied weights, a skip connection, clipping by norm, and
    backwards in two parts.
    """
    tasks, per_step, inputs, home, outputs = [], [], [], [], []

    def add_input(value, mesh, once=True):
        inputs.append(value)
        home.append(mesh)
        if once:
            per_step.append(value)

    last = num_stages - 1
    add_input("x", mesh_of(0), once=False)
    add_input("y", mesh_of(last), once=False)
    for s in range(num_stages):
        mesh = mesh_of(s)
        add_input(f"w{s}", mesh)
        per_step += [f"g{s}", f"new{s}", f"sq{s}"]
        outputs.append(f"new{s}")
        tasks.append(
            TaskSpec(
                name=f"zero{s}", mesh=mesh, stage=s, phase="start", inputs=(), outputs=(f"g{s}",)
            )
        )
    per_step += ["loss", "norm"]
    tasks.append(
        TaskSpec(
            name="zero_loss", mesh=mesh_of(last), stage=last, phase="start", inputs=(),
            outputs=("loss",),
        )
    )  # fmt: skip
    outputs.append("loss")
    for s in range(num_stages):
        mesh = mesh_of(s)
        reads = [f"w{s}", "x" if s == 0 else f"a{s - 1}"]
        writes = [f"a{s}", f"r{s}"]
        if tied and s == last:
            reads.append("w0")
        if skip and s == 0:
            writes.append("skip")
        if skip and s == last and last:
            reads.append("skip")
        if s == last:
            reads += ["y", "loss"]
            writes = [f"r{s}", "loss"] + (["skip"] if skip and s == 0 else [])
        tasks.append(
            TaskSpec(
                name=f"fwd{s}", mesh=mesh, stage=s, phase="forward", inputs=tuple(reads),
                outputs=tuple(writes), donated=("loss",) if s == last else (),
            )
        )  # fmt: skip
        reads = [f"w{s}", f"r{s}", f"g{s}"] + ([] if s == last else [f"d{s + 1}"])
        writes = [f"g{s}"] + ([f"d{s}"] if s else [])
        if tied and s == last and last:
            reads.append("gtied")
            writes.append("gtied")
        phase = "backward"
        if split:
            phase = "backward_weight"
            if s:
                given = [value for value in reads if not value.startswith("g")]
                tasks.append(
                    TaskSpec(
                        name=f"input{s}", mesh=mesh, stage=s, phase="backward_input",
                        inputs=tuple(given), outputs=(f"d{s}", f"kept{s}"),
                    )
                )  # fmt: skip
                reads = [f"kept{s}", *(value for value in reads if not value.startswith("d"))]
                writes.remove(f"d{s}")
        tasks.append(
            TaskSpec(
                name=f"bwd{s}", mesh=mesh, stage=s, phase=phase, inputs=tuple(reads),
                outputs=tuple(writes), donated=(f"g{s}", f"r{s}"),
            )
        )  # fmt: skip
    if tied and last:
        per_step.append("gtied")
        tasks.append(
            TaskSpec(
                name="zero_tied", mesh=mesh_of(last), stage=last, phase="start", inputs=(),
                outputs=("gtied",),
            )
        )  # fmt: skip
    updates = []
    for s in range(num_stages):
        mesh = mesh_of(s)
        grads = (f"g{s}",) + (("gtied",) if tied and s == 0 and last else ())
        weights = (f"w{s}", *grads) + (("norm",) if clip else ())
        updates.append(
            TaskSpec(
                name=f"update{s}", mesh=mesh, stage=s, phase="update", inputs=weights,
                outputs=(f"new{s}",), donated=(f"w{s}", f"g{s}"),
            )
        )  # fmt: skip
        if clip:
            updates.append(
                TaskSpec(
                    name=f"square{s}", mesh=mesh, stage=s, phase="update", inputs=grads,
                    outputs=(f"sq{s}",),
                )
            )  # fmt: skip
    if clip:
        updates.append(
            TaskSpec(
                name="norm", mesh=mesh_of(0), stage=0, phase="update",
                inputs=tuple(f"sq{s}" for s in range(num_stages)), outputs=("norm",),
            )
        )  # fmt: skip
    # The square is listed after the update that consumes the gradient, so put squares first.
    updates.sort(key=lambda task: task.name.startswith("update"))
    return TaskGraph(
        tasks=(*tasks, *updates),
        per_step=tuple(per_step),
        inputs=tuple(inputs),
        home=tuple(home),
        outputs=tuple(outputs),
    )


@settings(derandomize=True, max_examples=120, deadline=None)
@given(
    name=st.sampled_from(TRAINING),
    meshes=st.integers(1, 4),
    chunks=st.integers(1, 3),
    microbatches=st.integers(1, 7),
    split=st.booleans(),
    tied=st.booleans(),
    skip=st.booleans(),
    clip=st.booleans(),
    receive=st.sampled_from([None, "early", "late"]),
)
def test_programs_define_what_they_read_leak_nothing_and_do_not_deadlock(
    name, meshes, chunks, microbatches, split, tied, skip, clip, receive
):
    stages = meshes * chunks if name == "interleaved-1f1b" else meshes
    graph = training_graph(
        stages, lambda s: s % meshes, tied=tied, skip=skip, clip=clip, split=split
    )
    warmups = (
        adaptive_warmups([0.4] * (stages - 1), 1.0, microbatches) if name == "adaptive" else None
    )
    schedule = emit(graph, name, microbatches, warmups=warmups, receive=receive)
    left = interpret(graph, schedule, microbatches)
    assert [sorted(buffers) for buffers in left] == [
        sorted([f"new{s}" for s in range(stages) if s % meshes == mesh]
               + (["loss"] if (stages - 1) % meshes == mesh else []))
        for mesh in range(meshes)
    ]  # fmt: skip
    runs = Counter(i.task for p in schedule.programs for i in p if i.kind == "run")
    for task in graph.tasks:
        once = task.phase in ("start", "update")
        assert runs[task.name] == (1 if once else microbatches)
    if receive == "early":
        interpret(graph, schedule, microbatches, blocking_sends=True)


def kinds(program):
    return [f"{i.kind} {','.join((*i.inputs, *i.outputs))}" for i in program if i.kind != "run"]


def two_stages(**changes):
    tasks = {
        "fwd0": TaskSpec(
            name="fwd0", mesh=0, stage=0, phase="forward", inputs=("w", "x"), outputs=("a",)
        ),
        "fwd1": TaskSpec(
            name="fwd1", mesh=1, stage=1, phase="forward", inputs=("a",), outputs=("z",)
        ),
    }
    tasks.update(changes)
    return TaskGraph(
        tasks=tuple(tasks.values()), per_step=("w",), inputs=("w", "x"), home=(0, 0), outputs=("z",)
    )


def test_forward_only_graph_runs_forwards_and_frees_inputs_at_their_last_use():
    graph = two_stages()
    schedule = emit(graph, "gpipe", 2)
    assert kinds(schedule.programs[0]) == [
        "free x@0", "send a@0", "free a@0", "free w,x@1", "send a@1", "free a@1"
    ]  # fmt: skip
    assert [sorted(s) for s in interpret(graph, schedule, 2)] == [[], ["z@0", "z@1"]]


def test_a_forward_only_schedule_holds_one_microbatch_and_refuses_backwards():
    graph = two_stages()
    schedule = emit(graph, "forward-only", 3)
    assert [sorted(s) for s in interpret(graph, schedule, 3)] == [[], ["z@0", "z@1", "z@2"]]
    with pytest.raises(ValueError, match="runs no backward, but the graph has"):
        emit(training_graph(2, lambda s: s), "forward-only", 3)


@pytest.mark.parametrize("empty", [0, 3])
def test_an_interleaved_stage_may_have_nothing_to_run(empty):
    """The planner gives stages to meshes before it knows which of their equations are left."""
    full = training_graph(4, lambda s: s % 2)
    left = [task for task in full.tasks if task.stage != empty]
    made = {value for task in left for value in task.outputs} | set(full.inputs)
    lacking = {value: task.mesh for task in left for value in task.inputs if value not in made}
    inputs, home = (*full.inputs, *lacking), (*full.home, *lacking.values())
    outputs = tuple(value for value in full.outputs if value in made)
    graph = evolve(full, tasks=tuple(left), inputs=inputs, home=home, outputs=outputs)
    schedule = emit(graph, "interleaved-1f1b", 4)
    interpret(graph, schedule, 4)
    runs = {i.task for program in schedule.programs for i in program if i.kind == "run"}
    assert runs == {task.name for task in left}


def test_a_delayed_backward_by_weight_comes_after_the_next_forward():
    graph = training_graph(2, lambda s: s, split=True)
    program = emit(graph, "zero-bubble-h1", 3).programs[1]
    runs = [
        f"{i.task}@{i.microbatch}" for i in program if i.kind == "run" and i.microbatch is not None
    ]
    assert runs == [
        "fwd1@0", "input1@0", "fwd1@1", "input1@1", "bwd1@0", "fwd1@2", "input1@2", "bwd1@1",
        "bwd1@2",
    ]  # fmt: skip


def test_an_input_of_every_microbatch_is_on_each_mesh_that_reads_it_and_never_sent():
    graph = TaskGraph(
        tasks=(
            TaskSpec(
                name="f", mesh=0, stage=0, phase="forward", inputs=("x",), outputs=("h",)
            ),
            TaskSpec(
                name="g", mesh=1, stage=1, phase="forward", inputs=("h", "x"), outputs=("y",)
            ),
        ),
        per_step=(), inputs=("x",), home=(0,), outputs=("y",),
    )  # fmt: skip
    made = emit(graph, "gpipe", 3)
    interpret(graph, made, 3)
    sent = [i.inputs[0] for program in made.programs for i in program if i.kind == "send"]
    assert sent == ["h@0", "h@1", "h@2"]


def test_a_per_step_input_read_on_another_mesh_is_sent_once():
    reader = TaskSpec(
        name="fwd1", mesh=1, stage=1, phase="forward", inputs=("a", "w"), outputs=("z",)
    )
    graph = two_stages(fwd1=reader)
    schedule = emit(graph, "gpipe", 3)
    sent = [i.inputs[0] for i in schedule.programs[0] if i.kind == "send"]
    assert sent == ["w", "a@0", "a@1", "a@2"]
    interpret(graph, schedule, 3)


def test_an_accumulator_read_elsewhere_is_sent_after_its_last_change():
    graph = training_graph(2, lambda s: s, tied=True)
    program = emit(graph, "1f1b", 4).programs[1]
    sent = [k for k, i in enumerate(program) if i.kind == "send" and i.inputs == ("gtied",)]
    last_backward = max(k for k, i in enumerate(program) if i.task == "bwd1" and i.kind == "run")
    assert len(sent) == 1
    assert sent[0] > last_backward


def test_receives_are_late_in_1f1b_and_early_in_eager_1f1b():
    graph = training_graph(2, lambda s: s)

    def gap(name):
        program = emit(graph, name, 4).programs[1]
        received = next(k for k, i in enumerate(program) if i.outputs == ("a0@2",))
        used = next(k for k, i in enumerate(program) if i.kind == "run" and "a0@2" in i.inputs)
        return sum(i.kind == "run" for i in program[received:used])

    assert gap("1f1b") == 0
    assert gap("eager-1f1b") >= 1


def test_donated_buffers_are_freed_too_on_request():
    graph = training_graph(2, lambda s: s)
    plain, freed = emit(graph, "1f1b", 2), emit(graph, "1f1b", 2, free_donated=True)

    def buffers(schedule):
        return {b for p in schedule.programs for i in p if i.kind == "free" for b in i.inputs}

    donated = {"w0", "w1", "g0", "g1", "r0@0", "r0@1", "r1@0", "r1@1"}
    assert buffers(freed) - buffers(plain) == donated
    assert not buffers(plain) & donated


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (TaskSpec(name="fwd1", mesh=1, stage=1, phase="forward", inputs=("b",), outputs=("z",)),
         "'b@0', which is no input"),
        (TaskSpec(name="fwd1", mesh=1, stage=1, phase="forward", inputs=("a",), outputs=("a",)),
         "exists already on mesh 0"),
        (TaskSpec(name="fwd1", mesh=1, stage=0, phase="forward", inputs=("a",), outputs=("z",)),
         "a stage has one mesh"),
        (TaskSpec(name="fwd1", mesh=1, stage=1, phase="forward", inputs=("a", "w"), outputs=("z",),
                  donated=("w",)), "do not donate it"),
        (TaskSpec(name="up", mesh=1, stage=1, phase="update", inputs=("a",), outputs=("z",)),
         "once per microbatch"),
    ],
)  # fmt: skip
def test_graphs_that_cannot_run_are_refused(task, message):
    with pytest.raises(ValueError, match=message):
        emit(two_stages(fwd1=task), "gpipe", 2)


def plan_of(graph, name, microbatches, *, meshes=2, in_flight=()):
    """Return a plan of the tasks, with figures of no meaning."""
    stages = 1 + max(task.stage for task in graph.tasks)
    wire = LinkSpec(name="wire", bandwidth=1e9, latency=1e-6)
    device = DeviceSpec(name="chip", memory=1e9, memory_bandwidth=1e9, peak_flops={"float32": 1e12})
    hosts = HostGroup(
        device=device, num_hosts=1, devices_per_host=meshes, intra_host=wire, inter_host=wire
    )
    placed = [
        PlacedStage(
            candidate=StageCandidate(
                layer_start=s,
                layer_stop=s + 1,
                submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
                logical=LogicalMesh(axes=(MeshAxis(name="x", size=1),)),
                num_microbatches=microbatches,
                forward_seconds=1.0,
                backward_seconds=2.0,
            ),
            device_ids=(s % meshes,),
        )
        for s in range(stages)
    ]
    return ParallelPlan(
        program=ProgramSummary(fingerprint="f", inputs=(), num_ops=1, batch_size=None),
        cluster=ClusterSpec(name="host", host_groups=(hosts,)),
        layers=(),
        stage_plan=StagePlan(
            stages=tuple(placed),
            num_microbatches=microbatches,
            schedule=name,
            step_seconds=1.0,
            lower_bound=1.0,
            peak_bytes=(0.0,) * stages,
            in_flight=in_flight,
        ),
        shardings=tuple(
            StageSharding(
                mesh=DeviceMesh(
                    submesh=one.candidate.submesh,
                    logical=one.candidate.logical,
                    device_ids=one.device_ids,
                ),
                solution=ShardingSolution(
                    choice=(), objective=0.0, lower_bound=0.0, status="optimal", seconds=0.0
                ),
                state_specs={},
                activation_specs={},
                memory={},
            )
            for one in placed
        ),
        tasks=graph,
        step_seconds=1.0,
        lower_bound=1.0,
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_read_back_has_the_lists_of_the_plan_written(name):
    rule = SCHEDULE_RULES[name]
    graph = two_stages()
    if rule.has_backward:
        stages = 4 if rule.interleaves else 2
        graph = training_graph(
            stages, lambda s: s % 2, tied=True, clip=True, split=rule.splits_backward
        )
    held = (3, 1) if name == "adaptive" else ()
    plan = plan_of(graph, name, 5, in_flight=held)
    read = instruction_lists(from_json(to_json(plan), ParallelPlan))
    assert read == instruction_lists(plan) == emit(graph, name, 5, warmups=held or None)
    assert [len(program) for program in read.programs] != [0, 0]


def test_the_lists_follow_the_microbatches_in_flight_of_the_plan():
    graph = training_graph(2, lambda s: s)
    eager = instruction_lists(plan_of(graph, "1f1b", 5, in_flight=(4, 1)))
    assert eager == emit(graph, "1f1b", 5, warmups=(4, 1)) != emit(graph, "1f1b", 5)


def test_the_microbatches_in_flight_of_an_interleaved_plan_are_its_schedule_s_own():
    graph = training_graph(4, lambda s: s % 2)
    held = order("interleaved-1f1b", 4, 4, num_meshes=2)
    plan = plan_of(
        graph, "interleaved-1f1b", 4, in_flight=tuple(held.in_flight(s) for s in range(4))
    )
    assert instruction_lists(plan) == emit(graph, "interleaved-1f1b", 4)


def test_more_instructions_than_memory_holds_are_refused():
    with pytest.raises(ValueError, match=r"in 100000000 microbatches .* at most 33554432"):
        instruction_lists(plan_of(two_stages(), "gpipe", 10**8))


def test_a_plan_whose_schedule_is_not_known_is_refused():
    with pytest.raises(ValueError, match="schedule must be one of"):
        instruction_lists(plan_of(two_stages(), "loop", 2))
