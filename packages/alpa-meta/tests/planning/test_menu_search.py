"""The joint search: no plan with fixed stages or microbatches is faster than what it finds."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from attrs import evolve

import stage_dp
from alpa_interchange import SubmeshSpec
from alpa_meta import corpus
from alpa_meta.errors import InfeasibleError
from alpa_meta.inter_op.meshes import logical_meshes
from alpa_meta.options import Options
from alpa_meta.planning import finished_search, menu_search, planner
from alpa_meta.planning.chosen_plan import finish
from alpa_meta.planning.menu_search import ROOM, search_menu, sized_programs
from alpa_meta.planning.planner import _just_fitting, make_plan
from alpa_meta.planning.range_search import Prospect
from alpa_meta.planning.solved_stages import Lacking
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

WIDTH, LAYERS, BATCH = 1024, 4, 512


def _step(weights, batch):
    def loss(weights):
        x = batch
        for weight in weights:
            x = x + jnp.tanh(x @ weight["up"]) @ weight["down"]
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


LAYER = {
    "up": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.float32),
    "down": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32),
}
STEP = Step(_step, ([LAYER] * LAYERS, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)))
SLOW = "p3.16xlarge:16"  # two hosts with a slow link between them


@cache
def _plan(**options):
    return make_plan(STEP, cluster(SLOW), Options(cache=False, schedule=None, **options)).plan


def test_no_fixed_number_of_stages_or_microbatches_gives_a_faster_plan():
    free = _plan()
    for stages, count in ((1, 1), (2, 8), (2, 32), (4, 16)):
        fixed = _plan(num_stages=stages, num_microbatches=count)
        assert free.step_seconds <= fixed.step_seconds * 1.001
        assert free.lower_bound <= fixed.step_seconds


@pytest.mark.parametrize("no_better", [0.9, 0.9999])
def test_where_floors_prove_one_stage_no_menu_is_made(monkeypatch, no_better):
    one = make_plan(STEP, cluster("p3.16xlarge:4"), Options(cache=False))
    monkeypatch.setattr(menu_search, "LARGE_WINDOW", 0)
    monkeypatch.setattr(planner, "NO_BETTER", no_better)
    found = make_plan(STEP, cluster("p3.16xlarge:4"), Options(cache=False))
    assert found.plan.num_stages == one.plan.num_stages == 1
    assert found.plan.step_seconds == one.plan.step_seconds
    assert (found.menu is None) == (no_better == 0.9)
    if found.menu is None:
        assert 0.9**2 * one.plan.step_seconds <= found.plan.lower_bound <= one.plan.step_seconds


def test_a_search_cut_short_by_a_faster_plan_goes_on_if_that_does_not_fit():
    described, options = cluster(SLOW), Options(num_microbatches=8)
    model, sized = CostModel(described), sized_programs(STEP, described, options)
    assert sized is not None
    meshes = [
        (submesh, mesh)
        for submesh in (SubmeshSpec(num_hosts=1, devices_per_host=d) for d in (1, 2, 4, 8))
        for mesh in logical_meshes(model, submesh, 1)
    ]

    def search(worth):
        return search_menu(STEP, sized, meshes, model, options, [8], worth=worth)

    free, cut_short = search(float("inf")), search(0.0)
    assert cut_short.plan.step_seconds >= free.plan.step_seconds
    assert cut_short.bound <= free.plan.step_seconds * (1 + 1e-9)
    again = cut_short.searched_on()
    assert again.plan.step_seconds == pytest.approx(free.plan.step_seconds, rel=1e-9)


def test_a_boundary_between_hosts_is_priced_on_the_link_between_them():
    plan = _plan(num_stages=2, num_microbatches=8)
    first, second = plan.stage_plan.stages
    hosts = {device // 8 for device in (*first.device_ids, *second.device_ids)}
    assert hosts == {0, 1}
    inside = make_plan(
        STEP,
        cluster("p3.16xlarge:8"),
        Options(cache=False, num_stages=2, num_microbatches=8),
    ).plan.stage_plan.stages[0]
    assert first.candidate.boundary_seconds > inside.candidate.boundary_seconds


def test_short_memory_is_met_by_recomputation_or_smaller_microbatches():
    roomy = _plan()
    peak = max(sharding.peak_bytes for sharding in roomy.shardings)
    tight = _plan(memory=0.5 * peak)
    assert max(sharding.peak_bytes for sharding in tight.shardings) <= 0.5 * peak
    assert tight.step_seconds >= roomy.step_seconds


def test_memory_that_no_pipeline_fits_is_refused():
    with pytest.raises(InfeasibleError, match="lacks at least|state alone"):
        _plan(memory=1e6)


def test_the_chosen_recomputation_is_the_plan_of_each_layer():
    plan = _plan(recompute="full")
    assert {layer.recomputation for layer in plan.layers} == {"full"}


def test_sizes_whose_programs_have_other_equations_are_left_out():
    def noisy(weights, batch, key):
        def loss(weights):
            level = jax.random.uniform(key, (len(batch),))  # of one example nothing is broadcast
            x = batch * level[:, None]
            for weight in weights:
                x = x + jnp.tanh(x @ weight["up"]) @ weight["down"]
            return jnp.mean(x**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    layer = {
        "up": jax.ShapeDtypeStruct((8, 32), jnp.float32),
        "down": jax.ShapeDtypeStruct((32, 8), jnp.float32),
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    step = Step(noisy, ([layer] * 2, jax.ShapeDtypeStruct((16, 8), jnp.float32), key))
    options = Options(cache=False)
    sized = sized_programs(step, cluster("h100:2"), options)
    assert sized is not None and [one.samples for one in sized["none"]] == [2, 4, 8]
    assert make_plan(step, cluster("h100:2"), options).plan.num_stages >= 1


def test_programs_traced_anew_and_cut_ones_are_not_mixed():
    """Groups of four examples have a largest one: four microbatches cut groups, two do not."""

    def step(weights, batch):
        def loss(weights):
            groups = jnp.tanh(batch @ weights).reshape(-1, min(4, len(batch)), 8)
            return jnp.mean(((groups - groups.max(1, keepdims=True)) @ weights) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - gradient, value

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (8, 8)))
    made = Step(step, tuple(shapes), exact=False)
    assert made.program(4).averaged and not made.program(2).averaged
    sized = sized_programs(made, cluster("h100:8"), Options(exact=False))
    assert sized is not None


def _search_of_gpt(size, **told):
    """Return the search of one stage on two devices, its step, cluster and options."""
    model = corpus.build("gpt", size)
    step, two = Step(model.train_step, (model.state, model.batch)), cluster("h100:2")
    costs, whole = CostModel(two), SubmeshSpec(num_hosts=1, devices_per_host=2)
    meshes = [(whole, mesh) for mesh in logical_meshes(costs, whole, 1)]
    options = Options(cache=False, num_stages=1, **told)
    sized = sized_programs(step, two, options)
    assert sized is not None
    counts = [options.num_microbatches] if options.num_microbatches else None
    search = search_menu(step, sized, meshes, costs, options, counts)
    assert search is not None
    return search, (step, two, options)


def test_the_menu_knows_what_one_program_on_all_devices_holds():
    search, problem = _search_of_gpt("small", num_microbatches=16)
    found = search.stage_plan().peak_bytes
    (exact,) = (sharding.peak_bytes for sharding in make_plan(*problem).plan.shardings)
    assert exact <= max(found) <= 1.05 * exact


def test_one_stage_is_searched_with_more_memory_where_it_is_short():
    free, _ = _search_of_gpt("tiny")
    assert free.within_more() is None
    memory = 0.4 * max(stage_dp.device_bytes(free.plan))
    short, _ = _search_of_gpt("tiny", memory=memory)
    more = short.within_more()
    assert more is not None
    assert [group.memory for group in more.problem.device_groups] == [memory * (1 + ROOM)]
    assert more.plan.step_seconds <= short.plan.step_seconds
    # The bound is that of the memory there is.
    assert more.bound == short.bound


def test_stages_are_solved_for_what_the_step_takes():
    """With room, the first stage has shorter forward passes, which the second does not wait for,
    and a longer update, which ends the step: as much work, but a step of 3.94 ms, not 3.76."""
    told = {"num_stages": 2, "num_microbatches": 8}
    roomy = _plan(**told)
    assert roomy.step_seconds <= _plan(memory=4e7, **told).step_seconds * 1.001


def test_stages_that_take_more_than_their_rows_say_are_not_chosen_again(monkeypatch):
    told = {"num_stages": 2, "num_microbatches": 8, "offload": "none"}
    memory = 1.5 * max(_plan(**told).stage_plan.peak_bytes)
    tried = []

    def lacking_a_byte_at_first(plan, *others, **passes):
        tried.append(plan.stages)
        if plan.stages == tried[0]:
            return Lacking(1.0, memory + 1.0 - max(plan.peak_bytes))
        return finish(plan, *others, **passes)

    monkeypatch.setattr(finished_search, "finish", lacking_a_byte_at_first)
    found = _plan(memory=memory, **told)
    assert len(tried) > 1 and tried.count(tried[0]) == 1
    assert max(found.stage_plan.peak_bytes) <= memory


def test_one_stage_that_recomputes_is_held_against_one_that_does_not():
    model = CostModel(cluster("p3.16xlarge:4"))

    def other(*counts, **options):
        found = Prospect(1.0, lambda: pytest.fail("finished"), None, counts)
        return _just_fitting(found, STEP, model, Options(cache=False, **options))

    (exact,) = other(4)
    plan = exact.finish().plan
    assert plan.num_microbatches == 4 and len(plan.stage_plan.stages) == 1
    assert {layer.recomputation for layer in plan.layers} == {"none"}
    assert exact.seconds == pytest.approx(plan.step_seconds)
    assert other() == other(4, memory=1e6) == other(4, recompute="full") == []


def test_a_pipeline_that_fits_in_less_memory_fits_in_more():
    """Of the stages of one mesh those solved first took all that the rows of the others left, and
    nothing fitted in the first of these."""
    layer = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct((*(n // 2 for n in one.shape),), one.dtype), LAYER
    )
    step = Step(_step, ([layer] * 8, jax.ShapeDtypeStruct((BATCH, WIDTH // 2), jnp.float32)))
    told = Options(
        cache=False,
        schedule="interleaved-1f1b",
        num_stages=8,
        num_microbatches=16,
        offload="none",
    )
    described = cluster(SLOW)
    free = make_plan(step, described, told).plan
    for share in (0.4, 0.35):
        memory = share * max(free.device_bytes)
        found = make_plan(step, described, evolve(told, memory=memory)).plan
        assert max(found.stage_plan.peak_bytes) < max(found.device_bytes) <= memory * (1 + 1e-9)
        assert found.device_bytes == stage_dp.device_bytes(found.stage_plan)
