from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from descent import descend
from jax import lax
from jax.experimental import io_callback

import alpa_meta as alpa
from alpa_interchange import ShardingSpec, Strategy
from alpa_meta.audit.account import account
from alpa_meta.audit.hlo import compiled_collectives
from alpa_meta.operators import sharding_rule
from alpa_meta.spmd import JaxprPlan
from ilp_sharding.strategies import enumerate_strategies


def normal(number, *shape):
    return jnp.asarray(np.random.default_rng(number).normal(size=shape) / 2, jnp.float32)


def mlp_loss(params, batch):
    hidden = jax.nn.gelu(batch @ params["in"] + params["bias"])
    dropped = hidden * jax.random.bernoulli(jax.random.key(5), 0.8, hidden.shape)
    return jnp.mean((dropped @ params["out"] - batch) ** 2)


def attention_loss(params, batch):
    tokens, labels = batch
    x = params["table"][tokens]
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, params[n]) for n in "qkv")
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k)
    mask = jnp.tril(jnp.ones((scores.shape[-2],) * 2, bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    x = x + jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, params["o"])
    logits = x @ params["table"].T
    log = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log, labels[..., None], -1).mean()


def conv_loss(params, images):
    def convolve(x, kernel, stride):
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x = jax.nn.relu(convolve(images, params["first"], 1))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = convolve(x, params["second"], 2)
    return jnp.mean((x - x.mean((0, 1, 2))) ** 2)


def scan_loss(params, x):
    @jax.checkpoint
    def layer(x, weights):
        return jnp.tanh(x @ weights["w"]) + x, (x**2).sum()

    x, norms = lax.scan(layer, x, params)
    return jnp.mean(x**2) + norms.mean()


def repeated_loss(params, x):
    def again(carry, row):
        return (jnp.tanh(carry[0] @ params["w"]) + row, carry[1] + carry[0] @ params["w"]), None

    (x, total), _ = lax.scan(again, (x[0], jnp.zeros_like(x[0])), x[1:])
    return jnp.mean(x**2 + total)


def moe_loss(params, x):
    logits = x @ params["router"]
    gates, experts = lax.top_k(jax.nn.softmax(logits), 2)
    order = jnp.argsort(experts.ravel())
    rows = x[order // 2]
    sizes = jnp.bincount(experts.ravel(), length=4)
    hidden = jax.nn.silu(lax.ragged_dot(rows, params["in"], sizes))
    out = lax.ragged_dot(hidden, params["out"], sizes)
    back = jnp.zeros_like(x).at[order // 2].add(out * gates.ravel()[order, None])
    return jnp.mean((back - x) ** 2)


PROGRAMS = {
    "mlp": (
        descend(mlp_loss),
        ({"in": normal(1, 8, 16), "out": normal(2, 16, 8), "bias": normal(3, 16)}, normal(4, 8, 8)),
    ),
    "attention": (
        descend(attention_loss),
        (
            {
                "table": normal(1, 16, 8),
                **{n: normal(k + 2, 8, 2, 4) for k, n in enumerate("qkv")},
                "o": normal(5, 2, 4, 8),
            },
            (jnp.arange(32).reshape(4, 8) % 16, jnp.arange(32).reshape(4, 8) * 7 % 16),
        ),
    ),
    "convolution": (
        descend(conv_loss),
        ({"first": normal(1, 3, 3, 2, 4), "second": normal(2, 3, 3, 4, 4)}, normal(3, 4, 8, 8, 2)),
    ),
    "scan with recomputation": (
        descend(scan_loss),
        ({"w": normal(1, 4, 8, 8)}, normal(2, 8, 8)),
    ),
    "sums carried by a loop": (
        descend(repeated_loss),
        ({"w": normal(1, 8, 8)}, normal(2, 4, 8, 8)),
    ),
    "experts": (
        descend(moe_loss),
        (
            {"router": normal(1, 8, 4), "in": normal(2, 4, 8, 16), "out": normal(3, 4, 16, 8)},
            normal(4, 16, 8),
        ),
    ),
}


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        pytest.param(seed, name, marks=pytest.mark.bulk if name in ("mlp", "attention") else ())
        for seed, name in enumerate(PROGRAMS)
    ],
)
def test_a_training_step_is_right_whatever_its_plan(run, same, name, seed):
    function, args = PROGRAMS[name]
    found = run(function, args, ((2, 2, 2), (4, 2))[seed % 2], seed=seed)
    same(found)
    axis_sizes = dict(zip(found.mesh.axis_names, found.mesh.shape, strict=True))
    report = account(found.planned, compiled_collectives(found.text), axis_sizes)
    assert report.ok, report.text()


def test_loops_and_branches_are_right_whatever_their_plan(run, same):
    def newton(x):
        def unfinished(state):
            return (state[1] < 6) & (jnp.abs(state[0]).max() > 1e-3)

        return lax.while_loop(unfinished, lambda s: (s[0] - s[0] @ s[0] / 4, s[1] + 1), (x, 0))

    def program(x, index):
        branches = [lambda x: x @ x, lambda x: x.sum(0) + x, lambda x: jnp.sort(x, 0)]
        y = lax.switch(index, branches, x)
        z = lax.cond(y.sum() > 0, lambda y: (y, y.max()), lambda y: (-y, y.min()), y)
        return newton(x), y, z, lax.map(lambda row: row * row.sum(), x)

    for seed, index in ((0, 0), (1, 7)):
        same(run(program, (normal(1, 8, 8) / 8, jnp.int32(index)), (2, 2), seed=seed))


def test_a_plan_for_another_jaxpr_is_refused(run):
    whole = ShardingSpec(((),))

    def plan(closed, mesh):
        return JaxprPlan((whole,), (), (whole,))

    with pytest.raises(ValueError, match="the plan has 0 strategies, the jaxpr has 1"):
        run(lambda x: x + 1, (jnp.ones(8),), (2,), plan=plan)


def test_a_carry_has_one_spec(run):
    from alpa_meta.spmd import RegionPlan

    whole, split = ShardingSpec(((),)), ShardingSpec((("x",),))

    def plan(closed, mesh):
        (inner,) = closed.jaxpr.eqns
        body = JaxprPlan(
            (whole,),
            (Strategy(assignment=(), operands=(whole, whole), results=(whole,)),),
            (split,),
        )
        assert len(inner.params["jaxpr"].jaxpr.eqns) == 1
        return JaxprPlan((whole,), (RegionPlan((whole,), (split,), (body,)),), (split,))

    with pytest.raises(ValueError, match="carries of a 'scan' region must have one spec"):
        run(
            lambda x: lax.scan(lambda c, _: (c * c, None), x, length=3)[0],
            (jnp.ones(8),),
            (2,),
            plan=plan,
        )


def test_an_unreduced_sum_leaves_the_program_as_one_part_per_device(run):
    split = ShardingSpec((("x",),))

    def plan(closed, mesh):
        summed = ShardingSpec((), ("x",))
        strategy = Strategy(assignment=(("a", ("x",)),), operands=(split,), results=(summed,))
        return JaxprPlan((split,), (strategy,), (summed,))

    found = run(lambda x: x.sum(), (jnp.arange(8.0),), (4,), plan=plan)
    assert found.actual[0].tolist() == [1.0, 5.0, 9.0, 13.0]
    assert found.planned == ()


def test_a_transform_runs_before_its_parts_are_gathered_along_an_inner_dim(run, same):
    split, whole = ShardingSpec(((), ("x",), ())), ShardingSpec(((), (), ()))

    def plan(closed, mesh):
        (eqn,) = closed.jaxpr.eqns
        rule = sharding_rule(eqn)
        assert rule is not None
        strategies = enumerate_strategies(rule, mesh)
        chosen = next(s for s in strategies if s.results == (split,))
        return JaxprPlan((split,), (chosen,), (whole,))

    value = normal(9, 4, 8, 8).astype(jnp.complex64)
    same(run(lambda x: (lax.fft(x, "fft", (8,)),), (value,), (4,), plan=plan))


def test_the_host_is_called_once_whatever_the_number_of_devices():
    seen, asked = [], []

    def ask(value):
        asked.append(value.shape)
        return np.float32(value.sum()), value[:2] > 0

    def step(weights, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
        jax.debug.callback(lambda value: seen.append(float(value)), x.sum())
        shapes = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((2,), bool)
        return weights - gradient, (loss, io_callback(ask, shapes, x.sum(1)))

    weights, x = jnp.eye(8), jnp.arange(128.0).reshape(16, 8)
    expected = jax.jit(step)(weights, x)
    jax.effects_barrier()
    seen.clear()
    asked.clear()
    options: dict[str, Any] = {
        "cluster": "host:8",
        "num_stages": 1,
        "num_microbatches": 1,
        "preset": "dp",
    }
    parallel = alpa.parallelize(step, executor="shard_map", donate=False, **options)
    found = parallel(weights, x)
    jax.block_until_ready(found)
    jax.effects_barrier()
    assert (seen, asked) == ([float(x.sum())], [(16,)])
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert parallel.executable.audit().ok


def test_an_ordered_print_on_several_devices_is_refused():
    def step(weights, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
        jax.debug.print("{loss}", loss=loss, ordered=True)
        return weights - gradient, loss

    options: dict[str, Any] = {
        "cluster": "host:8",
        "num_stages": 1,
        "num_microbatches": 1,
        "preset": "dp",
    }
    parallel = alpa.parallelize(step, executor="shard_map", **options)
    with pytest.raises(alpa.PlanError, match="leave out ordered=True"):
        parallel(jnp.eye(8), jnp.ones((16, 8)))
