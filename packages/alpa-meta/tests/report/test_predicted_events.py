"""The event simulator and the search's own step time are one model: equal to 1e-9."""

import jax
import jax.numpy as jnp
import perceptron
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange.schedule import TaskGraph, TaskSpec
from alpa_meta.options import Options
from alpa_meta.planning import planner
from alpa_meta.report.predicted_events import predicted_events
from alpa_meta.report.predicted_simulation import predicted_simulation
from alpa_meta.step.program import Step
from cost_model import cluster, simulate
from stage_dp import (
    SCHEDULE_RULES,
    SCHEDULES,
    adaptive_warmups,
    emit,
    instruction_lists,
    order,
    pipeline_time,
)


def pipeline(num_stages, num_meshes, rule):
    """Return the tasks of a pipeline: activations `a` forwards, cotangents `d` backwards."""
    tasks, last = [], num_stages - 1

    def add(name, stage, phase, inputs, outputs):
        tasks.append(
            TaskSpec(
                name=f"{name}{stage}", mesh=stage % num_meshes, stage=stage, phase=phase,
                inputs=tuple(inputs), outputs=tuple(outputs),
            )
        )  # fmt: skip

    for s in range(num_stages):
        add("f", s, "forward", [f"a{s - 1}" if s else "x"], [f"a{s}", f"r{s}"])
        read = [f"r{s}"] + ([f"d{s + 1}"] if s < last else [])
        made = [f"d{s}"] if s else []
        if not rule.has_backward:
            continue
        if rule.splits_backward:
            add("i", s, "backward_input", read, [*made, f"k{s}"])
            add("w", s, "backward_weight", [f"k{s}"], [f"g{s}"])
        else:
            add("b", s, "backward", read, [*made, f"g{s}"])
    return TaskGraph(tasks=tuple(tasks), per_step=(), inputs=("x",), home=(0,), outputs=())


seconds = st.lists(st.floats(0.1, 3), min_size=12, max_size=12)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    meshes=st.integers(1, 4),
    chunks=st.integers(2, 3),
    microbatches=st.integers(1, 8),
    forward=seconds,
    by_input=seconds,
    by_weight=seconds,
    crossing=seconds,
    slow_links=st.booleans(),
)
def test_the_simulated_step_is_the_longest_path(
    name, meshes, chunks, microbatches, forward, by_input, by_weight, crossing, slow_links
):
    rule = SCHEDULE_RULES[name]
    n = meshes * chunks if rule.interleaves else meshes
    crossing = [c * (1.0 if slow_links else 0.05) for c in crossing]
    backward = [i + w for i, w in zip(by_input, by_weight, strict=True)]
    warmups = adaptive_warmups(crossing[: n - 1], 1.0, microbatches) if name == "adaptive" else None
    expected = pipeline_time(
        order(name, n, microbatches, num_meshes=meshes, warmups=warmups),
        forward[:n], backward[:n], crossing[: n - 1], weight=by_weight[:n],
    ).step_seconds  # fmt: skip
    task_seconds: dict[str, float] = {}
    for s in range(n):
        task_seconds |= {f"f{s}": forward[s], f"b{s}": backward[s]}
        task_seconds |= {f"i{s}": by_input[s], f"w{s}": by_weight[s]}

    def transfer(source, target, value):
        stage = int(value[1:])
        return crossing[stage if value[0] == "a" else stage - 1]

    graph = pipeline(n, meshes, rule)
    found = simulate(emit(graph, name, microbatches, warmups=warmups), task_seconds, transfer)
    assert found.step_seconds == pytest.approx(expected, rel=1e-9)


def test_transfers_take_the_seconds_of_their_boundary(make_plan):
    plan = make_plan(2, 4)
    first, second = plan.stage_plan.stages
    first = evolve(first, candidate=evolve(first.candidate, boundary_seconds=7e-4))
    plan = evolve(plan, stage_plan=evolve(plan.stage_plan, stages=(first, second)))
    sends = [event for event in predicted_events(plan) if event.instruction.kind == "send"]
    assert len(sends) == 8  # an activation forwards and a cotangent backwards, 4 microbatches
    assert all(event.stop - event.start == pytest.approx(7e-4) for event in sends)


def test_a_norm_of_all_gradients_does_not_part_the_simulated_step_from_the_plans():
    def clipped_step(weights, batch):
        gradients = jax.grad(perceptron.loss)(weights, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        return [w - 0.1 * g / norm for w, g in zip(weights, gradients, strict=True)]

    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    step = Step(clipped_step, (weights, jax.ShapeDtypeStruct((16, 64), jnp.float32)))
    plan = planner.make_plan(
        step, cluster("h100:2"), Options(cache=False, num_stages=2, num_microbatches=4)
    ).plan
    updates = {
        instruction.task
        for program in instruction_lists(plan).programs
        for instruction in program
        if instruction.kind == "run" and instruction.phase == "update"
    }
    assert len(updates) > 2  # each stage waits in its update for the norm
    assert predicted_simulation(plan).step_seconds == pytest.approx(plan.step_seconds, rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_values_that_later_stages_read_too_do_not_part_the_simulated_step_from_the_plans(schedule):
    """As what a decoder reads of its encoder: it was sent as a part of the first boundary only."""

    def step(weights, batch):
        def loss(weights):
            seen = jnp.tanh(batch @ weights[0])
            x = seen
            for weight in weights[1:]:
                x = jnp.tanh(x @ weight) * seen
            return jnp.mean(x**2)

        gradients = jax.grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8
    batch = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    options = Options(
        cache=False, num_layers=8, num_stages=4, num_microbatches=4, schedule=schedule
    )
    plan = planner.make_plan(Step(step, (weights, batch)), cluster("p3.16xlarge:4"), options).plan
    boundaries = [stage.candidate.boundary_seconds for stage in plan.stage_plan.stages[:-1]]
    assert min(boundaries) > 0
    assert predicted_simulation(plan).step_seconds == pytest.approx(plan.step_seconds, rel=1e-9)
