import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.operators import sharding_rule
from alpa_meta.step.trace import inline

X = jnp.asarray(np.random.default_rng(0).integers(-99, 99, (4, 8, 6)), jnp.float32)
EDGE = X[:, :1] * 0.5


def names(closed):
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


SHIFTS = {
    "next": lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))),
    "before": lambda x: lax.pad(x[:, 3:], 7.0, ((0, 0, 0), (0, 3, 0), (0, 0, 0))),
    "two dims": lambda x: lax.pad(x[:, 1:, :-2], 0.0, ((0, 0, 0), (0, 1, 0), (2, 0, 0))),
    "twice": lambda x: lax.pad(x[:, 1:][:, 1:], 0.0, ((0, 0, 0), (0, 2, 0), (0, 0, 0))),
    "round": lambda x: jnp.roll(x, 3, axis=1),
    "round twice": lambda x: jnp.roll(x, (-1, 2), axis=(1, 2)),
    "with a first": lambda x: jnp.concatenate([EDGE, x[:, :-1]], 1),
    "with a last": lambda x: jnp.concatenate([x[:, 1:], jnp.ones((4, 1, 6))], 1),
    "three parts": lambda x: jnp.concatenate([x[:, 6:], EDGE, x[:, 1:6]], 1),
    "cut and restored": lambda x: lax.pad(x[:, 2:], 1.0, ((0, 0, 0), (2, 0, 0), (0, 0, 0))),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_shifts_and_their_gradients_stay_the_same_to_the_bit(name):
    function = SHIFTS[name]

    def loss(x):
        return (function(x) * X**2).sum()

    for one in (function, jax.grad(loss)):
        closed = inline(jax.make_jaxpr(one)(X))
        found = jax.jit(jax.extend.core.jaxpr_as_fun(closed))(X)[0]
        assert (np.asarray(found) == np.asarray(jax.jit(one)(X))).all()


@pytest.mark.parametrize("name", ["next", "before", "two dims", "round", "round twice"])
def test_a_shifted_dim_may_be_sharded(name):
    def loss(x):
        return (SHIFTS[name](x) * X).sum()

    closed = inline(jax.make_jaxpr(jax.grad(loss))(X))
    assert not {"slice", "concatenate", "split"} & set(names(closed))
    pads = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "pad"]
    assert pads
    for eqn in pads:
        assert str(sharding_rule(eqn)) == "a b c,  -> a b c"


def test_negative_zeros_go_round_as_they_are():
    x = jnp.full((1, 4, 1), -0.0)
    closed = inline(jax.make_jaxpr(lambda x: jnp.roll(x, 1, axis=1))(x))
    assert np.signbit(jax.extend.core.jaxpr_as_fun(closed)(x)[0]).all()


def test_a_cut_whose_elements_come_back_as_padding_is_left_alone():
    closed = inline(jax.make_jaxpr(SHIFTS["cut and restored"])(X))
    assert names(closed) == ["slice", "pad"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.concatenate([x[:, :4], x], 1),
        lambda x: lax.pad(x[:, :4], 0.0, ((0, 0, 0), (0, 2, 0), (0, 0, 0))),
        lambda x: jnp.concatenate([x[:, k : k + 2] for k in (6, 4, 2, 0)], 1),
    ],
)
def test_joins_that_do_not_restore_the_dim_are_left_alone(function):
    closed = inline(jax.make_jaxpr(function)(X))
    assert "slice" in names(closed)


def test_inlining_again_changes_nothing():
    closed = inline(jax.make_jaxpr(SHIFTS["round twice"])(X))
    assert str(inline(closed)) == str(closed)


def test_shifts_are_merged_inside_loops():
    def function(x):
        return lax.scan(lambda c, _: (jnp.roll(c, 1, axis=1), None), x, None, length=3)[0]

    (eqn,) = inline(jax.make_jaxpr(function)(X)).jaxpr.eqns
    assert "concatenate" not in [e.primitive.name for e in eqn.params["jaxpr"].jaxpr.eqns]
