import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_meta.operators import sharding_rule
from alpa_meta.step.trace import inline

X = jnp.arange(64.0).reshape(8, 8)


def rule_of(function, *args):
    return str(sharding_rule(inline(jax.make_jaxpr(function)(*args)).jaxpr.eqns[0]))


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ((4, 8), (32,), "a b -> (a b)"),
        ((32,), (4, 8), "(a b) -> a b"),
        ((4, 6), (8, 3), "a (b c) -> (a b) c"),
        ((2, 3, 4), (2, 12), "a b c -> a (b c)"),
        ((1, 8), (8, 1), "1 a -> a 1"),
        ((6, 4), (4, 6), "(a b) c -> (a e) d"),
        ((3, 3, 1, 4), (3, 3, 4), "a b 1 c -> a b c"),
    ],
)
def test_a_reshape_shares_the_factors_of_its_dims(before, after, rule):
    found = rule_of(lambda x: x.reshape(after), jnp.zeros(before))
    if rule.count("(") == 2 and "e" in rule:
        assert found.split(" -> ")[0].startswith("(a ") and " (a " in found
    else:
        assert found == rule


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, 8), (32,)), ((8, 4), (2, 4, 4)), ((4, 2, 4), (8, 4)), ((6, 4), (4, 6))],
)
def test_reshapes_of_shards_are_shards_of_reshapes(check, before, after):
    check(
        lambda x: x.reshape(after),
        (jnp.arange(float(X.size))[: 2 * 12 if before == (6, 4) else 32].reshape(before),),
    )


def moves(x):
    wide = lax.broadcast_in_dim(x, (8, 2, 8), (0, 2))
    turned = lax.transpose(wide, (2, 0, 1))
    counted = lax.broadcasted_iota(jnp.int32, (8, 4), 0) + lax.broadcasted_iota(
        jnp.int32, (8, 4), 1
    )
    joined = lax.concatenate([x, x], 1)
    padded = lax.pad(x, 0.0, ((1, 2, 0), (0, 0, 0)))
    parts = lax.split(x, (2, 6), 0)
    return (
        turned,
        counted,
        joined,
        padded,
        parts,
        lax.rev(x, (1,)),
        x[1:7, :],
        lax.squeeze(x[:1], (0,)),
    )


def test_copies_of_a_repeated_dim_are_shared_out_and_other_dims_are_parallel(check):
    def twice(x):
        return jnp.tile(x, (1, 4))

    assert rule_of(twice, X) == "a b -> a (c b)"
    checked = check(twice, (X,), mesh_shape=(2, 2), count=8)
    assert checked["tile"] == 8
    assert check(lambda x: jnp.tile(x, (4, 2)), (X[:1, :0],), count=8)["tile"] > 0


def test_elements_move_within_their_shards(check):
    done = check(moves, (X,), mesh_shape=(2, 4), count=4)
    names = "broadcast_in_dim transpose iota concatenate pad split rev slice"
    assert {name for name in names.split() if done.get(name)} == set(names.split())


def test_a_stack_keeps_the_new_dim_whole(check):
    check(lambda x: jnp.stack([x, x + 1], 1), (X,), count=3)
    check(lambda x: [row * 2 for row in jnp.unstack(x, axis=1)], (X[:, :2],), count=3)


def test_a_reinterpreted_type_keeps_the_word_dim_whole(check):
    check(lambda x: lax.bitcast_convert_type(x, jnp.uint8), (X,), count=3)
    check(
        lambda x: lax.bitcast_convert_type(
            x, jnp.float64 if jnp.result_type(float) == jnp.float64 else jnp.uint32
        ),
        (X,),
        count=3,
    )
