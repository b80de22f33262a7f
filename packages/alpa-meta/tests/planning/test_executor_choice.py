"""Which executor runs a stage, what it says of itself, and that its numbers are right."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from rich.console import Console

import alpa_meta as alpa
from alpa_interchange import ShardingSpec, Strategy
from alpa_meta.planning.executor_choice import gathered_operators
from alpa_meta.report.plan_table import print_plan


def centred(x):
    return x - jnp.mean(x, axis=-1, keepdims=True)


def primitive(name, platform_rule):
    """Return a linear, symmetric primitive of no table: `centred`, lowered by `platform_rule`."""
    made = Primitive(name)
    made.def_impl(centred)
    made.def_abstract_eval(lambda x: x)
    mlir.register_lowering(made, mlir.lower_fun(platform_rule, multiple_results=False))
    ad.deflinear2(made, lambda cotangent, _: [made.bind(cotangent)])
    batching.primitive_batchers[made] = lambda values, dims: (
        made.bind(jnp.moveaxis(values[0], dims[0], 0)),
        0,
    )
    return made


centre_p = primitive("row_centre", centred)
opaque_p = primitive(
    "opaque_centre",
    lambda x: jax.pure_callback(
        lambda v: v - v.mean(-1, keepdims=True), jax.ShapeDtypeStruct(x.shape, x.dtype), x
    ),
)


def make_step(activation):
    def step(weights, batch):
        def loss(weights):
            return jnp.mean((activation(jnp.tanh(batch @ weights["a"])) @ weights["b"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), {"loss": value}

    return step


def arguments(examples=64, width=32):
    keys = jax.random.split(jax.random.key(0), 3)
    a, b = (np.asarray(jax.random.normal(key, (width, width))) / 8 for key in keys[:2])
    return {"a": a, "b": b}, np.asarray(jax.random.normal(keys[2], (examples, width)))


def same(step, parallel, args):
    expected, actual = jax.jit(step)(*args), parallel.gather(parallel(*args))
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 1, "num_microbatches": 1},
        {"num_stages": 1, "num_microbatches": 4, "preset": "dp"},
        {"num_stages": 2, "num_microbatches": 4},
    ],
)
def test_the_constraint_executor_gives_the_result_of_one_device(options):
    step, args = make_step(jnp.sin), arguments()
    parallel = alpa.parallelize(step, cluster="host:4", executor="constraint", **options)
    same(step, parallel, args)
    plan = parallel.lower(*args).planned.plan
    assert [one.executor for one in plan.shardings] == ["constraint"] * options["num_stages"]
    assert all("shard_map" not in one for one in parallel.executable.compiled_texts().values())


WHOLE = ShardingSpec(((), ()))
ROWS = ShardingSpec((("x",), ()))
SUM = ShardingSpec(((), ()), partial=("x",))


@pytest.mark.parametrize(
    ("given", "read", "found"),
    [
        (WHOLE, WHOLE, ()),
        (ROWS, WHOLE, ("row_centre",)),
        (SUM, WHOLE, ("row_centre",)),
        (WHOLE, ROWS, ("row_centre",)),
        (WHOLE, SUM, ("row_centre",)),
    ],
)
def test_an_operator_without_a_rule_gathers_where_what_it_reads_or_makes_is_in_parts(
    given, read, found
):
    traced = jax.make_jaxpr(lambda x: jnp.sin(centre_p.bind(x)))(jnp.zeros((8, 4))).jaxpr
    steps = [
        Strategy(assignment=(), operands=(WHOLE,), results=(WHOLE,)),
        Strategy(assignment=(), operands=(read,), results=(read,)),
    ]
    assert gathered_operators(traced.eqns, steps, {traced.invars[0]: given}) == found


def test_auto_leaves_an_unregistered_operator_to_xla_where_it_would_be_gathered():
    step = make_step(centre_p.bind)
    sent = {}
    for executor in ("auto", "shard_map"):
        parallel = alpa.parallelize(
            step, cluster="host:4", preset="dp", num_microbatches=1, executor=executor
        )
        args = arguments(16384, 64)  # enough bytes to outweigh the meeting of the devices
        same(step, parallel, args)
        plan = parallel.lower(*args).planned.plan
        audit = parallel.executable.audit()
        sent[executor] = sum(report.compiled_bytes for report in audit.tasks.values())
        shown = io.StringIO()
        print_plan(plan, Console(file=shown, width=200))
        (stage,) = plan.shardings
        if executor == "auto":
            assert (stage.executor, stage.freed_ops) == ("constraint", ("row_centre",))
            assert not stage.replicated_ops and not audit.ok
            assert "NO PROOF: XLA chose the collectives of train.0" in audit.text()
            assert "operators without a sharding rule: row_centre" in shown.getvalue()
        else:
            assert (stage.executor, stage.replicated_ops) == ("shard_map", ("row_centre",))
            assert audit.ok and "constraint" not in shown.getvalue()
    assert sent["auto"] < 0.25 * sent["shard_map"]


def test_auto_keeps_shard_map_for_rules_and_for_what_xla_cannot_partition():
    for activation in (jnp.sin, opaque_p.bind):
        parallel = alpa.parallelize(
            make_step(activation), cluster="host:4", preset="dp", num_microbatches=1
        )
        plan = parallel.lower(*arguments()).planned.plan
        assert [one.executor for one in plan.shardings] == ["shard_map"]


def test_a_saved_plan_keeps_its_executor_unless_told_otherwise():
    step, args = make_step(jnp.sin), arguments()
    given: dict[str, Any] = {"cluster": "host:4", "num_stages": 1, "num_microbatches": 1}
    made = alpa.parallelize(step, executor="constraint", **given).lower(*args).planned.plan
    for executor, expected in (("auto", "constraint"), ("shard_map", "shard_map")):
        again = alpa.parallelize(step, plan=made, executor=executor, **given)
        (stage,) = again.lower(*args).planned.plan.shardings
        assert stage.executor == expected
