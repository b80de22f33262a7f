import jax
import jax.numpy as jnp
import pytest


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
