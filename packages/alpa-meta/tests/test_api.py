"""What a parallel step answers without running: plans, caches, births, errors."""

from typing import get_args, get_origin, get_overloads, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa
import stage_dp
from alpa_meta.types import PyTree
from cost_model import cluster

WEIGHT, BATCH = np.eye(8, dtype=np.float32), np.ones((4, 8), np.float32)


def step(weight, batch):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weight)
    return weight - gradient, value


@pytest.fixture(scope="module")
def parallel():
    """Return a planned step on two devices."""
    found = alpa.parallelize(step, cluster="host:2", num_stages=1)
    found.plan_for(WEIGHT, BATCH)
    return found


def test_type_checkers_see_the_signature_of_the_step():
    direct, decorator = map(get_type_hints, get_overloads(alpa.parallelize))
    function, made = direct["function"], direct["return"]
    assert (get_origin(made), get_args(made)) == (alpa.ParallelStep, get_args(function))
    assert decorator["return"].__args__ == (function, made)
    call = get_type_hints(alpa.ParallelStep.__call__)
    parameters, result = made.__args__
    assert call["return"] == result
    assert [call["args"], call["keywords"]] == [parameters.args, parameters.kwargs]


def test_arrays_and_their_shapes_give_one_plan(parallel):
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (WEIGHT, BATCH)]
    assert parallel.lower(*shapes) is parallel.lower(WEIGHT, BATCH)
    assert parallel.lower(*shapes).plan is parallel.plan
    assert parallel.schedule == stage_dp.instruction_lists(parallel.plan)


def test_a_step_is_traced_again_under_another_precision_of_products():
    parallel = alpa.parallelize(step, cluster="host:2", num_stages=1)
    usual = parallel.lower(WEIGHT, BATCH)
    with jax.default_matmul_precision("highest"):
        highest = parallel.lower(WEIGHT, BATCH)
        assert parallel.lower(WEIGHT, BATCH) is highest
    assert parallel.lower(WEIGHT, BATCH) is usual
    assert "HIGHEST" in str(highest.planned.program.jaxpr)
    assert "HIGHEST" not in str(usual.planned.program.jaxpr)


def test_lowering_compiles_once(parallel):
    assert parallel.lower(WEIGHT, BATCH).compile() is parallel.lower(WEIGHT, BATCH).compile()


def test_the_decorated_function_keeps_its_name(parallel):
    assert parallel.__name__ == "step"
    assert parallel.__wrapped__ is step


def test_a_cluster_is_a_name_a_value_or_the_devices_there_are():
    assert alpa.parallelize(step, cluster="host:2").cluster == cluster("host:2")
    assert alpa.parallelize(step, cluster=cluster("h100:8")).cluster.num_devices == 8
    assert alpa.parallelize(step).cluster == alpa.local_cluster()
    assert alpa.local_cluster().num_devices == jax.device_count()


def test_settings_are_options():
    base = alpa.Options(num_stages=1)
    chosen = alpa.parallelize(step, options=base, num_microbatches=2).options
    assert (chosen.num_stages, chosen.num_microbatches) == (1, 2)
    with pytest.raises(TypeError, match="colour"):
        alpa.parallelize(step, colour="red")


def test_before_the_first_call_there_is_no_plan():
    fresh = alpa.parallelize(step)
    for ask in (lambda: fresh.plan, lambda: fresh.executable, lambda: fresh.place(WEIGHT)):
        with pytest.raises(alpa.PlanError, match=r"no plan yet|not compiled yet"):
            ask()


def test_state_is_born_once_the_batch_is_known(parallel):
    born = parallel.init(lambda: jnp.eye(8))
    assert isinstance(born, jax.Array)
    assert born.sharding == parallel.executable.input_sharding("weight")
    unborn = alpa.parallelize(step, cluster="host:2", num_stages=1).init(lambda: jnp.eye(8))
    assert unborn.shapes().shape == (8, 8)


def test_a_tuple_of_states_is_born_for_several_arguments():
    def two(weight, momentum, batch):
        gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weight)
        momentum = 0.9 * momentum + gradient
        return weight - momentum, momentum

    parallel = alpa.parallelize(two, cluster="host:2", num_stages=1)
    weight, momentum = parallel.init(lambda: (jnp.eye(8), jnp.zeros((8, 8))), batch=BATCH)
    assert weight.shape == momentum.shape == (8, 8)
    weight, momentum = parallel(weight, momentum, BATCH)
    assert np.isfinite(weight).all()


def test_a_state_of_another_size_is_refused(parallel):
    with pytest.raises(alpa.PlanError, match="given 2 arrays, the step has 1"):
        parallel.place((WEIGHT, WEIGHT))


def test_a_batch_that_is_a_tuple_is_one_argument_or_several():
    def one(weight, batch):
        x, y = batch
        return weight - jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(weight)

    def several(weight, x, y):
        return one(weight, (x, y))

    for function in (one, several):
        parallel = alpa.parallelize(function, cluster="host:2", num_stages=1)
        assert parallel.init(lambda: jnp.eye(8), batch=(BATCH, BATCH)).shape == (8, 8)
    with pytest.raises(alpa.PlanError, match="the step takes 3"):
        alpa.parallelize(several, cluster="host:2").init(lambda: jnp.eye(8), batch=(BATCH,) * 3)


def test_several_states_cannot_be_unpacked_before_they_are_born():
    with pytest.raises(alpa.PlanError, match="batch="):
        _, _ = alpa.parallelize(step).init(lambda: (jnp.eye(8), jnp.eye(8)))


def test_steps_and_plans_are_shown_as_people_read_them(parallel):
    assert repr(alpa.parallelize(step)) == "<ParallelStep step: not planned yet>"
    assert repr(parallel).startswith("<ParallelStep step: 1 stage, ")
    assert str(parallel).count("\n") == 2
    lowered = parallel.lower(WEIGHT, BATCH)
    assert repr(lowered).startswith("<Lowered: 1 stage, ")
    assert str(lowered) == str(parallel.plan)
    assert "<table>" in parallel._repr_html_() and "<table>" in lowered._repr_html_()


def test_arguments_may_be_named(parallel):
    assert parallel.lower(batch=BATCH, weight=WEIGHT) is parallel.lower(WEIGHT, BATCH)


def test_a_state_that_no_batch_is_known_for_says_so_where_it_is_looked_into():
    state = alpa.parallelize(step, cluster="host:2").init(lambda: {"w": jnp.eye(8)})
    with pytest.raises(alpa.PlanError, match="the state's 'w' is made by init"):
        _ = state["w"]
    with pytest.raises(AttributeError, match="the state's 'params' is made by init"):
        _ = state.params


def test_a_state_that_is_not_made_yet_is_audited():
    parallel = alpa.parallelize(step, cluster="host:2", num_stages=1)
    audit = parallel.audit(parallel.init(lambda: jnp.asarray(WEIGHT)), jnp.asarray(BATCH))
    assert audit.ok and audit.numerics is not None


THREE: PyTree = 3  # of no type, as what users without a type checker give
NOTHING: PyTree = None
TEXT: PyTree = "r c -> r c"


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda plan: alpa.parallelize(THREE), TypeError, "a training step, a function, got 3"),
        (
            lambda plan: alpa.parallelize(step, cluster=THREE).plan_for(WEIGHT, BATCH),
            alpa.PlanError,
            "cluster must be a name .* got 3",
        ),
        (
            lambda plan: alpa.parallelize(step, batch_argnums=(1, 5)).plan_for(WEIGHT, BATCH),
            alpa.PlanError,
            r"batch_argnums=\(1, 5\) names argument 5, but the step takes 2, numbered from 0",
        ),
        (
            lambda plan: alpa.parallelize(step, batch_argnums=1, static_argnums=1).lower(
                WEIGHT, BATCH
            ),
            alpa.PlanError,
            "argument 1 of the step is named by batch_argnums and by static_argnums",
        ),
        (
            lambda plan: alpa.explain(plan, NOTHING),
            alpa.PlanError,
            "have not, got None",
        ),
        (lambda plan: alpa.pin(WEIGHT, "xy"), alpa.PlanError, "one entry per dim, .* got 'xy'"),
        (
            lambda plan: alpa.sharding_rule("my_kernel", TEXT),
            TypeError,
            "the rule of 'my_kernel' must be a function",
        ),
    ],
)
def test_what_is_given_wrongly_is_said_with_what_came(parallel, mistake, error, message):
    with pytest.raises(error, match=message):
        mistake(parallel.plan)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num_stages": 3}, "has num_stages=1, but num_stages=3 is asked for"),
        ({"schedule": "gpipe"}, "has schedule='1f1b', but schedule='gpipe' is asked for"),
        ({"num_token_slices": 2}, "has num_token_slices=1, but num_token_slices=2 is asked for"),
        ({"num_layers": 7}, "has num_layers=., but num_layers=7 is asked for"),
        ({"recompute": "full"}, "has recompute=.'none'.*, but recompute=.'full'.* is asked for"),
        ({"offload": "moments"}, "has offload='none', but offload='moments' is asked for"),
        ({"mesh_shape": (1, 2)}, r"has mesh_shape=.*, but mesh_shape=\(1, 2\) is asked for"),
        ({"memory": 8.0}, "holds .* bytes on a device, but memory=8 is asked for"),
    ],
)
def test_options_beside_a_plan_that_ask_for_another_are_refused(parallel, setting, message):
    with pytest.raises(alpa.PlanError, match=message):
        alpa.parallelize(step, plan=parallel.plan, **setting).plan_for(WEIGHT, BATCH)


def test_options_that_a_plan_was_made_with_are_taken_beside_it():
    told: dict[str, PyTree] = {"num_stages": 1, "recompute": "full", "offload": "none"}
    told |= {"memory": 1e9, "mesh_shape": (2,)}
    made = alpa.parallelize(step, cluster="host:2", **told).plan_for(WEIGHT, BATCH)
    again = alpa.parallelize(step, cluster="host:2", plan=made, **told).plan_for(WEIGHT, BATCH)
    assert again.shardings == made.shardings


def test_arguments_that_a_call_leaves_out_may_be_named():
    def optional(weight, batch, rows=None):
        return step(weight, batch)

    parallel = alpa.parallelize(optional, cluster="host:2", batch_argnums=(1, 2), num_stages=1)
    assert parallel.plan_for(WEIGHT, BATCH).program.batch_size == 4
