"""Token slices pass through the stages of a pipeline, and give what one device does."""

import causal_models
import jax
import numpy as np
import optax
import pytest
from attrs import evolve
from causal_models import Model, batch, loss, parameters

import alpa_meta as alpa
import stage_dp
from alpa_interchange import ParallelPlan, from_json, to_json
from alpa_meta.audit.held_memory import held_memory
from alpa_meta.errors import PlanError
from alpa_meta.operators.elementwise import is_barrier
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.report.predicted_simulation import predicted_simulation
from alpa_meta.step.program import Step
from alpa_meta.token_slices.places import SliceRequest
from alpa_meta.token_slices.staged import slice_numbers
from cost_model import cluster

OPTIMISER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2))


def step_and_arguments(model):
    def step(state, given):
        params, moments = state
        value, found = jax.value_and_grad(loss(model))(params, given)
        updates, moments = OPTIMISER.update(found, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = parameters(model)
    return step, ((params, OPTIMISER.init(params)), batch(model))


def parallel(step, cluster, **options):
    return alpa.parallelize(step, cluster=cluster, donate=False, cache=False, **options)


def check(step, args, sliced):
    expected, found = jax.jit(step)(*args), sliced.gather(sliced(*args))
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-10, atol=1e-12)


def runs(sliced, mesh):
    found = sliced.schedule.programs[mesh]
    return [
        (i.phase, i.microbatch, i.slice_index)
        for i in found
        if i.kind == "run" and i.phase in ("forward", "backward")
    ]


def kept_too_long(instructions):
    """Return the values of a microbatch that are there while a task runs after their last use."""
    used: dict[str, int] = {}
    freed: dict[str, int] = {}
    for k, one in enumerate(instructions):
        for value in (*one.inputs, *one.outputs):
            (freed if one.kind == "free" else used)[str(value)] = k
    return [
        value
        for value, last in used.items()
        if "@" in value
        and any(one.kind == "run" for one in instructions[last + 1 : freed.get(value)])
    ]


def test_two_stages_of_two_microbatches_in_three_slices_give_what_one_device_does():
    step, args = step_and_arguments(Model(num_layers=2))
    sliced = parallel(
        step, "host:2", num_stages=2, num_microbatches=2, schedule="gpipe", token_slices=(5, 1, 6)
    )
    check(step, args, sliced)
    forwards = [("forward", m, k) for m in range(2) for k in range(3)]
    backwards = [("backward", m, k) for m in range(2) for k in (2, 1, 0)]
    assert runs(sliced, 0) == runs(sliced, 1) == forwards + backwards
    for mesh in range(2):
        assert not kept_too_long(sliced.schedule.programs[mesh])
    with pytest.raises(PlanError, match="num_token_slices is 3"):
        _ = alpa.Options(token_slices=(5, 7), num_token_slices=3).slice_request
    again = parallel(step, "host:2", plan=from_json(to_json(sliced.plan), ParallelPlan))
    assert again.plan_for(*args).tasks == sliced.plan.tasks


def test_the_predicted_step_counts_slices():
    step, args = step_and_arguments(Model(num_layers=2))
    options = {"num_stages": 2, "num_microbatches": 1, "schedule": "1f1b"}
    plan = parallel(step, "h100:1x2", token_slices=(4, 4, 4), **options).plan_for(*args)
    for stage in plan.stage_plan.stages:
        slices = stage.candidate.token_slices
        assert [one.tokens for one in slices] == [4, 4, 4]
        assert sum(s.forward_seconds for s in slices) == pytest.approx(
            stage.candidate.forward_seconds
        )
    uncut = [evolve(one.candidate, token_slices=()) for one in plan.stage_plan.stages]
    assert plan.step_seconds < stage_dp.step_seconds(uncut, "1f1b")
    assert plan.step_seconds == pytest.approx(predicted_simulation(plan).step_seconds, rel=1e-3)
    assert 0.5 * plan.step_seconds < plan.lower_bound <= plan.step_seconds


def test_the_planner_cuts_long_sequences_of_few_microbatches(monkeypatch):
    monkeypatch.setattr(causal_models, "TOKENS", 2048)
    step, args = step_and_arguments(Model(num_layers=2))
    options = {"num_stages": 2, "num_microbatches": 1}
    plan = parallel(step, "host:2", **options).plan_for(*args)
    whole = parallel(step, "host:2", num_token_slices=1, **options).plan_for(*args)
    assert sum(plan.program.token_slices) == 2048 and not whole.program.token_slices
    assert plan.step_seconds < 0.8 * whole.step_seconds
    assert 0.5 * plan.step_seconds < plan.lower_bound <= plan.step_seconds


def test_the_planner_cuts_between_chunks(monkeypatch):
    monkeypatch.setattr(causal_models, "TOKENS", 2115)  # no quarter of which is a multiple of 3
    step, args = step_and_arguments(Model("chunks", num_layers=4))
    options = {"num_stages": 4, "num_microbatches": 1}
    slices = parallel(step, "host:4", **options).plan_for(*args).program.token_slices
    assert sum(slices) == 2115 and len(slices) > 1
    assert not any(length % 3 for length in slices)


def test_a_number_of_slices_is_of_whole_chunks():
    step, args = step_and_arguments(Model("chunks", num_layers=2))
    options = {"num_stages": 2, "num_microbatches": 1}
    sliced = parallel(step, "host:2", num_token_slices=3, **options)
    check(step, args, sliced)
    assert sliced.plan.program.token_slices == (3, 6, 3)
    with pytest.raises(PlanError, match="are multiples of 3"):
        parallel(step, "host:2", num_token_slices=5, **options).plan_for(*args)
    with pytest.raises(PlanError, match="are multiples of 3"):
        parallel(step, "host:2", token_slices=(5, 7), **options).plan_for(*args)


def test_a_scan_over_layers_is_cut_over_stages_and_audited():
    step, args = step_and_arguments(Model(scan=True, remat=True, num_layers=4))
    sliced = parallel(
        step, "host:2", num_stages=2, num_microbatches=2, schedule="1f1b", num_token_slices=2
    )
    check(step, args, sliced)
    assert sliced.executable.audit().ok
    assert [i for i in runs(sliced, 0) if i[0] == "forward"] == [
        ("forward", microbatch, k) for microbatch in range(2) for k in range(2)
    ]


def test_all_slices_of_scanned_layers_are_in_the_stage_of_their_layers():
    """The pieces of slices that stood one slice after the other made a pipeline of slices, not of
    layers: `examples/long_context.py` with scanned layers was planned to take 1.64 s a step in two
    stages, not 1.06, and the second stage 272 MB beside 81 of the first, not 181 beside 165."""
    step, args = step_and_arguments(Model(scan=True, num_layers=4))
    plan = parallel(step, "host:2", num_stages=2, num_microbatches=1, num_token_slices=3)
    first, second = (
        {name for name in stage.state_specs if "layers" in name}
        for stage in plan.plan_for(*args).shardings
    )
    assert first and second and not first & second


def test_one_stage_on_four_devices_gives_what_one_device_does():
    step, args = step_and_arguments(Model(scan=True, remat=True, num_layers=2))
    check(step, args, parallel(step, "host:4", num_stages=1, num_token_slices=3))


def test_a_step_that_is_not_causal_is_refused_before_it_is_planned():
    step, args = step_and_arguments(Model("bidirectional"))
    with pytest.raises(PlanError, match="reads tokens after its own"):
        parallel(step, "host:2", num_token_slices=2).plan_for(*args)


RANDOM = [
    (Model(num_layers=2), (5, 1, 6)),  # two stages of two microbatches
    (Model("associative scan", num_layers=2), (7, 5)),  # two devices and one
    (Model("by hand", positions="rotary", longer=True, num_layers=2), (3, 4, 5)),
    (Model(scan=True, remat=True, num_layers=2), (2, 10)),
    (Model("recurrence", scan=True, remat=True, num_layers=2), (5, 7)),
]


@pytest.mark.sample(seed=1)  # test_program has the models, test_own_operators stages of others
@pytest.mark.parametrize("seed", range(len(RANDOM)))
def test_random_plans_of_slices_give_what_one_device_does_and_are_audited(seed):
    model, slices = RANDOM[seed]
    step, args = step_and_arguments(model)
    chosen = parallel(step, "host:4", token_slices=slices).random_plan(*args, seed=seed)
    sliced = parallel(step, "host:4", plan=chosen)
    check(step, args, sliced)
    assert sliced.plan.program.token_slices == slices
    assert sliced.executable.audit().ok


def test_three_stages_that_recompute_give_what_one_device_does():
    step, args = step_and_arguments(Model(num_layers=3))
    options = {"num_stages": 3, "num_microbatches": 1, "schedule": "1f1b", "recompute": "full"}
    check(step, args, parallel(step, "host:3", token_slices=(7, 5), **options))


def test_four_stages_of_a_scan_in_bfloat16_are_as_near_as_whole_sequences():
    step, (state, given) = step_and_arguments(Model(scan=True, num_layers=4))
    exact = jax.tree.leaves(jax.jit(step)(state, given))
    narrow = jax.tree.map(
        lambda leaf: leaf.astype("bfloat16") if leaf.dtype == "float64" else leaf, state
    )
    options = {"num_stages": 4, "num_microbatches": 1, "schedule": "1f1b"}
    sliced = parallel(step, "host:4", token_slices=(7, 5), **options)
    whole, found = jax.jit(step)(narrow, given), sliced.gather(sliced(narrow, given))
    for one, two, right in zip(jax.tree.leaves(whole), jax.tree.leaves(found), exact, strict=True):
        assert one.dtype == two.dtype
        wrong, allowed = (np.abs(np.float64(x) - np.float64(right)).max() for x in (two, one))
        assert wrong <= 2 * allowed + 2**-8 * np.abs(np.float64(right)).max()


def test_what_slices_hold_is_planned():
    step, args = step_and_arguments(Model(num_layers=2))
    options = {"num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}
    sliced = parallel(step, "host:2", token_slices=(4, 4, 4), **options)
    sliced.lower(*args)
    found = held_memory(sliced.compiled())
    for planned, held in zip(sliced.plan.stage_plan.peak_bytes, found, strict=True):
        assert held.buffer_bytes <= planned <= 1.3 * held.buffer_bytes


def test_equal_slices_of_a_recurrence_share_programs_which_are_compiled_once():
    step, args = step_and_arguments(Model("recurrence", positions="none", num_layers=2))
    options = {"num_stages": 2, "num_microbatches": 1, "schedule": "1f1b"}
    sliced = parallel(step, "host:2", token_slices=(2,) * 6, **options)
    sliced.lower(*args)
    tasks = sliced.compiled().tasks
    compiled = []

    def count(event, duration_secs, **kwargs):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    found = sliced(*args)
    num_compiled = len(compiled)
    # of each pass of each stage the first slice, the last, and one for all between; the updates
    passes = [name for name in tasks if name.split(".")[0] in ("forward", "backward")]
    assert len(passes) == 2 * 2 * 6
    assert num_compiled <= 2 * 2 * 3 + len(tasks) - len(passes) < len(tasks)
    for one, two in zip(
        jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(sliced.gather(found))
    ):
        np.testing.assert_allclose(two, one, rtol=1e-10, atol=1e-12)
    assert sliced.executable.audit().ok


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_what_a_slice_recomputes_waits_for_no_later_one(kind):
    """A barrier of all slices of a layer made its whole backward pass the first slice's: 93 ms a
    step, not 64, of `alpa plan --model gpt-2.6b --cluster p3.16xlarge:2x8 --layers 8 --batch 4
    --stages 4 --microbatches 2 --token-slices 4 --schedule 1f1b`."""
    model = Model(num_layers=3)
    step, args = step_and_arguments(model)
    sliced = Step(step, args).in_slices(SliceRequest(count=4))
    outlook, _ = outlook_of(sliced.program(1), alpa.Options(recompute=kind), cluster("host:2"))
    program, staging = outlook.program, outlook.staging
    numbers, backward = slice_numbers(program, staging), 0
    for eqn, phase, number in zip(staging.eqns, staging.phases, numbers, strict=True):
        own = {program.slice_of[var] for var in eqn.outvars if var in program.slice_of}
        if phase == "backward" and own:
            assert own == {number}
            backward += 1
    barriers = [n for e, n in zip(staging.eqns, numbers, strict=True) if is_barrier(e)]
    assert backward and set(barriers) == {0, 1, 2, 3}
