"""`on_nan`: NaN and infinity are found before the update and named, and the state is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_meta as alpa

OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
EXAMPLES = 8


def make():
    weights = {"a": jnp.eye(8) / 2, "b": jnp.eye(8) / 3}
    key = jax.random.key(0)
    return {"weights": weights, "moments": OPTIMISER.init(weights), "key": key, "last": 0.0}


def step(state, x):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(x @ weights["a"]) @ weights["b"] - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    updates, moments = OPTIMISER.update(gradients, state["moments"])
    key, _ = jax.random.split(state["key"])
    weights = optax.apply_updates(state["weights"], updates)
    return {"weights": weights, "moments": moments, "key": key, "last": loss}, loss


def batch(number):
    return np.random.default_rng(number).normal(size=(EXAMPLES, 8)).astype(np.float32)


def spoilt(number, example, value=np.nan):
    made = batch(number)
    made[example] = value
    return made


def words(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def copied(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(words(leaf).copy()) if is_key else words(leaf).copy()


def assert_equal(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(words(a), words(b)), found, expected)


@pytest.mark.fault(
    "NaN or infinity in a microbatch", "[`on_nan`](#stop-or-skip-at-nan): found before the update"
)
@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"),
    [
        (1, 1, None),
        pytest.param(1, 4, None, marks=pytest.mark.bulk),
        (2, 4, "zero-bubble-h1"),
        pytest.param(2, 1, "1f1b", marks=pytest.mark.bulk),
        pytest.param(2, 4, "1f1b", marks=pytest.mark.bulk),
    ],
)
def test_a_spoilt_microbatch_is_named_and_the_state_is_as_it_was(stages, microbatches, schedule):
    plain = alpa.parallelize(
        step,
        cluster="host:4",
        num_stages=stages,
        num_microbatches=microbatches,
        schedule=schedule,
        max_mesh_axes=1,
    )
    plan = plain.plan_for(make(), batch(0))
    raising = alpa.parallelize(step, plan=plan, on_nan="raise")
    skipping = alpa.parallelize(step, plan=plan, on_nan="skip")
    expected, state = make(), make()
    expected, wanted = plain(expected, batch(0))
    state, found = raising(state, batch(0))
    jax.tree.map(  # an update compiled apart may round otherwise
        lambda a, b: np.testing.assert_allclose(words(a), words(b), rtol=1e-6, atol=1e-7),
        (state, found),
        (expected, wanted),
    )

    before = raising.gather(state)
    example = EXAMPLES - 1
    bad = microbatches - 1
    with pytest.raises(alpa.NonFiniteError, match=f"step 2: microbatch {bad} gave NaN") as raised:
        raising(state, spoilt(1, example))
    kept, loss = raised.value.result
    assert_equal(raising.gather(kept), before)
    assert np.isnan(float(loss))

    skipped = make()
    skipped, _ = skipping(skipped, batch(0))
    with pytest.warns(alpa.NonFiniteWarning, match=r"step 2: microbatch 0 .*the step is skipped"):
        skipped, _ = skipping(skipped, spoilt(1, 0, np.inf))
    assert_equal(skipping.gather(skipped), before)
    for run, held in ((raising, kept), (skipping, skipped)):
        after, _ = run(held, batch(2))
        held, _ = run(run.place(jax.tree.map(copied, before)), batch(2))
        assert_equal(run.gather(after), run.gather(held))


def test_the_step_is_as_before_where_nothing_is_looked_at():
    guarded = alpa.parallelize(step, cluster="host:4", num_stages=1, on_nan="skip")
    plain = alpa.parallelize(step, cluster="host:4", num_stages=1)
    guarded(make(), batch(0))
    plain(make(), batch(0))
    assert set(plain.executable.tasks) == {"train.0"}
    assert plain.executable.only_run is not None and guarded.executable.only_run is None
    with pytest.raises(alpa.PlanError, match="make the step without on_nan"):
        guarded.executable.audit()
