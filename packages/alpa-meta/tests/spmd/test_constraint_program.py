import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from alpa_interchange import LogicalMesh, MeshAxis, ShardingSpec, Strategy
from alpa_meta import compat
from alpa_meta.spmd import (
    JaxprPlan,
    completed_plan,
    constraint_program,
    jax_sharding,
    random_plan,
)
from alpa_meta.spmd.constraint_program import free_variables
from alpa_meta.step.trace import inline

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=2)))
KEY = jax.random.key(0)


def mlp_step(params, batch):
    def loss(params):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ w), None

        hidden, _ = lax.scan(layer, batch, params["layers"])
        kept = jax.random.bernoulli(jax.random.key(5), 0.8, hidden.shape)
        return jnp.mean((hidden * kept @ params["out"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def mlp():
    params = {"layers": jax.random.normal(KEY, (2, 8, 8)), "out": jnp.ones((8, 4))}
    return mlp_step, (params, jax.random.normal(jax.random.key(1), (8, 8)))


def attention_step(params, batch):
    tokens, labels = batch

    def loss(params):
        x = params["table"][tokens]
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, params[name]) for name in "qkv")
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k)
        visible = jnp.tril(jnp.ones((scores.shape[-1],) * 2, bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, params["o"])
        log = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.take_along_axis(log, labels[..., None], -1).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def gpt():
    keys = dict(zip("qkvot", jax.random.split(KEY, 5), strict=True))
    params = {name: jax.random.normal(keys[name], (8, 2, 4)) / 3 for name in "qkv"}
    params["o"] = jax.random.normal(keys["o"], (2, 4, 8)) / 3
    params["table"] = jax.random.normal(keys["t"], (16, 8))
    tokens = jax.random.randint(KEY, (4, 4), 0, 16)
    return attention_step, (params, (tokens, (tokens + 1) % 16))


@pytest.mark.parametrize(("make", "seed"), [(mlp, 0), pytest.param(gpt, 3, marks=pytest.mark.bulk)])
def test_any_plan_gives_the_result_of_one_device(make, seed):
    function, args = make()
    leaves, tree = jax.tree.flatten(args)

    def flat(*values):
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, values)))

    closed = inline(jax.make_jaxpr(flat)(*leaves))
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    jax_mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    options = {"xla_backend_optimization_level": 0}
    expected = jax.jit(flat, compiler_options=options)(*leaves)
    plan = random_plan(closed, MESH, seed)
    shardings = [jax_sharding(spec, jax_mesh) for spec in completed_plan(plan).inputs]
    program = jax.jit(
        constraint_program(closed, plan, MESH),
        in_shardings=tuple(shardings),
        compiler_options=options,
    )
    actual = program(*jax.device_put(leaves, shardings))
    for one, other in zip(actual, expected, strict=True):
        scale = max(float(jnp.max(jnp.abs(other))), 1e-6)
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * scale)


def test_keys_and_the_numbers_folded_into_them_are_over_one_mesh():
    def function(key, numbers, x):
        def body(x, number):
            return x * jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, x.shape), None

        return lax.scan(body, x, numbers)[0]

    args = jax.random.key(3), jnp.arange(4), jnp.ones((8, 4))
    closed = inline(jax.make_jaxpr(function)(*args))
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    jax_mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    plan = random_plan(closed, MESH, 0)
    shardings = [jax_sharding(spec, jax_mesh) for spec in completed_plan(plan).inputs]
    program = jax.jit(
        constraint_program(closed, plan, MESH, jax_mesh), in_shardings=tuple(shardings)
    )
    (found,) = program(*jax.device_put(args, tuple(shardings)))
    np.testing.assert_array_equal(found, jax.jit(function)(*args))


def test_a_completed_plan_has_no_unreduced_sums_anywhere():
    function, args = mlp()
    closed = inline(jax.make_jaxpr(function)(*args))
    for seed in range(5):
        plan = completed_plan(random_plan(closed, MESH, seed))
        pending = [plan]
        while pending:
            one = pending.pop()
            steps = one.strategies
            for specs in (one.inputs, one.outputs, *(s.operands + s.results for s in steps)):
                assert not any(spec.partial for spec in specs)
            pending += [body for step in steps for body in getattr(step, "bodies", ())]


def test_what_is_whole_around_an_operator_without_a_rule_is_free():
    def function(x, w):
        shape = jax.ShapeDtypeStruct((8,), x.dtype)
        return jnp.tanh(jax.pure_callback(np.sum, shape, jnp.exp(x))) * 2, jnp.sin(w)

    closed = inline(jax.make_jaxpr(function)(jnp.ones((8, 4)), jnp.ones((8, 4))))
    eqns = compat.open_jaxpr(closed).eqns
    whole = tuple(
        Strategy(
            assignment=(),
            operands=tuple(ShardingSpec.replicated(len(compat.shape_of(a))) for a in eqn.invars),
            results=tuple(ShardingSpec.replicated(len(compat.shape_of(v))) for v in eqn.outvars),
        )
        for eqn in eqns
    )
    borders = ShardingSpec.replicated(2)
    plan = JaxprPlan((borders, borders), whole, (ShardingSpec.replicated(1), borders))
    free = free_variables(closed, plan)
    names = {eqn.primitive.name for eqn in eqns if free.intersection(eqn.outvars)}
    assert {"pure_callback", "exp", "tanh"} <= names and "sin" not in names
