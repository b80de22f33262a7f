"""How operators run, written by name and found again."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from attrs import evolve
from jsonschema import Draft202012Validator

from alpa_interchange import OperatorSharding, ShardingSpec, StageSharding, Strategy, to_json
from alpa_interchange.schema import FOLDER
from alpa_meta.errors import PlanError
from alpa_meta.intra_op import layouts
from alpa_meta.options import Options
from alpa_meta.planning.planner import restore
from alpa_meta.planning.sampling import sample_plan
from alpa_meta.step.program import Step
from cost_model import cluster
from ilp_sharding.strategies import natural_strategies

WEIGHTS = {
    "up": jax.ShapeDtypeStruct((2, 8, 16), jnp.float32),
    "down": jax.ShapeDtypeStruct((2, 16, 8), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def unrolled(weights, batch):
    def loss(weights):
        value = batch
        for k in range(2):
            value = jnp.tanh(value @ weights["up"][k]) @ weights["down"][k]
        return jnp.mean(value**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def scanned(weights, batch):
    def loss(weights):
        @jax.checkpoint
        def layer(value, parameters):
            hidden = jax.lax.cond(value[0, 0] > 0, jnp.tanh, jnp.sin, value @ parameters["up"])
            return hidden @ parameters["down"], ()

        value, _ = jax.lax.scan(layer, batch, weights)
        return jnp.mean(value**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    value = jax.lax.while_loop(lambda v: v > 1.0, lambda v: v / 2, value)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def planned(function, seed, **options):
    step = Step(function, (WEIGHTS, BATCH))
    return sample_plan(step, cluster("h100:4"), Options(**options), seed)


def restored(function, plan):
    return restore(Step(function, (WEIGHTS, BATCH)), plan, Options())


def changed(plan, **changes):
    """Return the plan with fields of its first stage's sharding changed."""
    first, *rest = plan.shardings
    return evolve(plan, shardings=(evolve(first, **changes), *rest))


def how_all_run(planned):
    """Return how every equation of every stage runs."""
    return [
        selection.strategy(k, sharding.solution.choice)
        for selection, sharding in zip(planned.selections, planned.plan.shardings, strict=True)
        for k in range(len(selection.records))
    ]


def without_numbers(plan):
    numberless = (evolve(s, solution=evolve(s.solution, choice=None)) for s in plan.shardings)
    return evolve(plan, shardings=tuple(numberless))


@pytest.mark.parametrize("function", [unrolled, scanned])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_every_operator_does_is_restored_without_numbers(function, num_stages, seed):
    first = planned(function, seed, num_stages=num_stages)
    again = restored(function, without_numbers(first.plan))
    assert how_all_run(again) == how_all_run(first)


def test_a_version_that_enumerates_in_another_order_restores_the_same(monkeypatch):
    first = planned(scanned, 0, num_stages=1)
    # Of its own: what is remembered of meshes must not outlive the other order.
    for name in ("_layouts", "_known_of"):
        fresh = functools.cache(getattr(layouts, name).__wrapped__)
        monkeypatch.setattr(layouts, name, fresh)
    monkeypatch.setattr(
        layouts, "natural_strategies", lambda *args: natural_strategies(*args)[::-1]
    )
    again = restored(scanned, first.plan)
    assert how_all_run(again) == how_all_run(first)
    choices = [plan.shardings[0].solution.choice for plan in (first.plan, again.plan)]
    assert choices[0] != choices[1]


def test_a_version_that_names_factors_otherwise_restores_the_same():
    first = planned(unrolled, 1, num_stages=1)
    (sharding,) = first.plan.shardings
    renamed = tuple(
        evolve(
            group,
            strategy=evolve(
                group.strategy,
                assignment=tuple((f"former {f}", axes) for f, axes in group.strategy.assignment),
            ),
        )
        for group in sharding.operators
    )
    again = restored(unrolled, changed(first.plan, operators=renamed))
    assert how_all_run(again) == how_all_run(first)


def test_every_operator_is_named_once_with_factors_specs_and_line():
    (sharding,) = planned(scanned, 0, num_stages=1).plan.shardings
    names = [name for group in sharding.operators for name in group.names]
    assert len(set(names)) == len(names)
    assert any(">0>" in name and "/scan.0" in name for name in names)
    assert {group.source.split(":")[0] for group in sharding.operators} <= {
        "test_plan_operators.py",
        "",
    }
    products = [g for g in sharding.operators if "dot_general" in g.names[0].rpartition("/")[2]]
    assert products and all(len(group.strategy.operands) == 2 for group in products)


def test_an_operator_without_such_a_strategy_is_named():
    plan = planned(unrolled, 0, num_stages=1).plan
    odd = Strategy(assignment=(), operands=(ShardingSpec((("z",),)),), results=())
    operators = tuple(
        evolve(group, strategy=odd) if any("tanh" in name for name in group.names) else group
        for group in plan.shardings[0].operators
    )
    with pytest.raises(PlanError, match=r"tanh\.\d' of stage 0 is run as replicated .*plan again"):
        restored(unrolled, changed(plan, operators=operators))


def test_an_input_that_the_plan_does_not_lay_out_is_named():
    plan = planned(unrolled, 0, num_stages=1).plan
    with pytest.raises(PlanError, match="does not say how 'batch' of stage 0"):
        restored(unrolled, changed(plan, state_specs={}))


def test_an_operator_that_the_plan_does_not_know_is_named():
    plan = planned(unrolled, 0, num_stages=1).plan
    products = tuple(
        group
        for group in plan.shardings[0].operators
        if not any("dot_general" in name for name in group.names)
    )
    with pytest.raises(PlanError, match=r"does not say how '.*dot_general\.0' of stage 0"):
        restored(unrolled, changed(plan, operators=products))


def test_a_plan_of_numbers_only_is_refused_as_of_an_older_schema():
    plan = planned(unrolled, 0, num_stages=1).plan
    with pytest.raises(PlanError, match=r"as plans of schema 0\.1 do"):
        restored(unrolled, changed(plan, operators=()))


@pytest.mark.parametrize("function", [unrolled, scanned])
def test_a_plan_is_valid_by_the_published_schema(function):
    plan = planned(function, 1, num_stages=2).plan
    schema = json.loads((FOLDER / "ParallelPlan.json").read_text())
    Draft202012Validator(schema).validate(json.loads(to_json(plan)))


def test_operators_that_run_alike_share_an_entry():
    (sharding,) = planned(unrolled, 0, num_stages=1).plan.shardings
    assert isinstance(sharding, StageSharding)
    kinds = [(g.names[0].split("/")[-1].split(".")[0], g.strategy) for g in sharding.operators]
    assert len(set(kinds)) == len(kinds)
    assert all(isinstance(group, OperatorSharding) for group in sharding.operators)
