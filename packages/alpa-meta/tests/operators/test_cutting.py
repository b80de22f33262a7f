import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.operators import operator_of, sharding_rule
from alpa_meta.step.trace import inline

X = jnp.arange(1.0, 129.0).reshape(16, 8)


def rule_of(function, *args):
    return str(sharding_rule(inline(jax.make_jaxpr(function)(*args)).jaxpr.eqns[0]))


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (lambda x: x[:8], "(a b) c -> a c"),
        (lambda x: x[:7], "1 a -> 1 a"),
        (lambda x: x[4:12:2], "1 a -> 1 a"),
        (lambda x: x[1::2], "(a b) c -> a c"),
        (lambda x: lax.pad(x, 0.0, ((0, 1, 1), (2, -2, 0))), "a c,  -> (a b) c"),
        (lambda x: lax.pad(x, 0.0, ((0, 0, 1), (2, -2, 0))), "1 a,  -> 1 a"),
        (lambda x: lax.rev(x, (0,)), "a b -> a b"),
        (lambda x: lax.split(x, (12, 4), 0), "(a b) d -> (a c) d, a d"),
        (lambda x: lax.concatenate([x, x[0:0]], 0), "1 a -> 1 a"),
    ],
)
def test_a_dim_is_shared_where_devices_can_divide_it_on_both_sides(function, rule):
    assert rule_of(function, X) == rule


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (4, 2), (8,)])
@pytest.mark.sample(seed=1, mesh_shape=2)
@pytest.mark.parametrize("seed", range(3))
def test_pieces_that_devices_exchange_make_the_whole_result(check, mesh_shape, seed):
    draw = random.Random(seed)
    n, m = 24, 48

    def function(x, y):
        start = draw.randrange(0, n + 1)
        half = x[start : start + 24] if draw.random() < 0.7 else x[24:]
        low = draw.randrange(-20, 20)
        padded = lax.pad(x, 7.0, ((low, draw.choice([-24, 0, 24]) - low, 0), (0, 0, 0)))
        stride = draw.choice([2, 3, 4])
        first = draw.randrange(stride)
        spread = lax.pad(y, 0.0, ((first, stride - 1 - first, stride - 1), (24, 0, 0)))
        cut = draw.choice([12, 24, 36])
        return (
            half,
            padded,
            x[first::stride],
            spread,
            lax.split(x, (cut, m - cut), 0),
            lax.concatenate(draw.choice([[x, y], [y, x, y], [y, y]]), 0),
            lax.rev(x, draw.choice([(0,), (0, 1)])),
        )

    x = jnp.asarray(np.random.default_rng(seed).integers(-99, 99, (m, 8)), jnp.float32)
    done = check(function, (x, -x[:n]), mesh_shape=mesh_shape, count=3, seed=seed, tolerance=0)
    assert set(done) == {"slice", "pad", "split", "concatenate", "rev"}
    assert min(done.values()) >= 1


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bool_, jnp.bfloat16])
def test_elements_of_any_type_move(check, dtype):
    x = (X % 3 > 0).astype(dtype)
    zero = jnp.zeros((), dtype)
    check(lambda x: (x[8:], lax.pad(x, zero, ((8, -8, 0), (0, 8, 0))), jnp.flip(x)), (x,), count=6)


def test_keys_are_cut_whole(check):
    keys = jax.random.split(jax.random.key(0), 8)
    check(lambda k: (k[4:], jnp.concatenate([k, k])), (keys,), count=4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))),
        lambda x: x[4:12],
        lambda x: lax.concatenate([x, x], 0),
        lambda x: lax.rev(x, (0,)),
    ],
)
def test_the_exchanges_that_are_priced_are_those_of_the_program(planned, function):
    eqn = inline(jax.make_jaxpr(function)(X)).jaxpr.eqns[-1]
    mesh = LogicalMesh(axes=(MeshAxis(name="x", size=4), MeshAxis(name="y", size=2)))
    strategies = []

    def wanted(strategy):
        dims = strategy.operands[0].dims
        found = dims == (("x",), ("y",)) and not strategy.results[0].partial
        strategies.extend([strategy] * found)
        return found

    found = planned(function, (X,), (4, 2), wanted)
    exchanges = operator_of(eqn).exchanges
    assert exchanges is not None
    priced = list(exchanges(eqn, strategies[0], mesh))
    assert [(c.kind, c.bytes, c.axes) for c in found] == priced
    assert priced
