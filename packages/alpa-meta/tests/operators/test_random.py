import jax
import jax.numpy as jnp
import pytest

from alpa_interchange import LogicalMesh, MeshAxis, ShardingSpec
from alpa_meta import compat
from alpa_meta.operators import sharding_rule
from alpa_meta.spmd import JaxprPlan, shard_map_program
from alpa_meta.step.trace import inline
from ilp_sharding.strategies import Conversions, natural_strategies


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_numbers_of_shards_are_shards_of_the_random_numbers(check, impl):
    def draw(seed):
        key = jax.random.key(seed, impl=impl)
        first, second = jax.random.split(jax.random.fold_in(key, 3))
        return (
            jax.random.bits(first, (8, 4)),
            jax.random.bits(second, (8,), "uint8"),
        )

    done = check(draw, (jnp.uint32(7),), count=3)
    assert done["random_bits"] >= 3


@pytest.mark.sample(dtype=2)
@pytest.mark.parametrize("dtype", ["uint8", "uint64", "uint16", "uint32"])
def test_bits_of_every_width_along_every_dim(check, dtype):
    def draw(seed):
        return jax.random.bits(jax.random.key(seed), (4, 1, 2, 8), dtype)

    with jax.enable_x64(dtype == "uint64"):
        done = check(draw, (jnp.uint32(7),), only="random_bits", mesh_shape=(2, 2, 2), count=12)
    assert done["random_bits"] == 12


def hashed(jaxpr):
    """Return the shapes that the generator hashes in a jaxpr."""
    found = []
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "threefry2x32":
            found.append(compat.shape_of(eqn.outvars[0]))
        for _, body in compat.subjaxprs(eqn):
            found += hashed(body)
    return found


def test_a_device_hashes_the_positions_of_its_own_part():
    mesh = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=4)))
    drawn = jax.make_jaxpr(lambda key: jax.random.bits(key, (6, 8)))(jax.random.key(0))
    closed = inline(drawn)
    (eqn,) = closed.jaxpr.eqns
    spec = ShardingSpec((("x",), ("y",)))
    rule = sharding_rule(eqn)
    assert rule is not None
    strategies = natural_strategies(rule, mesh)
    strategy = next(one for one in strategies if one.results == (spec,))
    plan = JaxprPlan((ShardingSpec(()),), (strategy,), (spec,))
    program = shard_map_program(closed, plan, mesh, Conversions(mesh, lambda *_: 1.0))
    assert hashed(jax.make_jaxpr(program)(jax.random.key(0))) == [(3, 2)]


def test_batches_of_keys_draw_independently(check):
    keys = jax.random.split(jax.random.key(1), 8)
    draw = jax.vmap(lambda key: jax.random.uniform(key, (4,)))
    check(draw, (keys,), only="random_bits", count=4)
    check(jax.vmap(lambda key: jax.random.split(key, 2)), (keys,), count=3)


def test_old_keys_and_gamma(check):
    def draw(words):
        return jax.random.gamma(words, jnp.ones((4,)))

    check(draw, (jax.random.PRNGKey(3),), only="random_gamma", count=1)
    check(
        lambda w: jax.random.uniform(w, (8, 4)),
        (jax.random.PRNGKey(3),),
        only="random_bits",
        count=3,
    )


def test_a_stateful_generator_returns_its_whole_state(check):
    state = jnp.array([1, 2, 3, 4], jnp.uint32)
    check(lambda s: jax.lax.rng_bit_generator(s, (8, 4)), (state,), only="rng_bit_generator")
