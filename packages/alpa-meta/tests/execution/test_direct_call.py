"""Calls like an earlier one go straight to the program, and every other call the long way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_meta.execution.executable import Executable


def step(state, batch):
    def loss(weights):
        return jnp.mean((state["activation"](batch @ weights["a"]) @ weights["b"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["weights"])
    weights = jax.tree.map(lambda w, g: w - 0.1 * g, state["weights"], gradients)
    return {**state, "weights": weights, "count": state["count"] + 1}, {"loss": value, "one": 1.0}


def made(seed=0):
    """Return a state with a leaf that is no array and one that is never read, and a batch."""
    keys = jax.random.split(jax.random.key(seed), 3)
    weights = {name: jax.random.normal(k, (8, 8)) for name, k in zip("ab", keys)}
    state = {"activation": jnp.tanh, "count": jnp.int32(3), "unread": keys[0], "weights": weights}
    return state, np.asarray(jax.random.normal(keys[2], (16, 8)))


def agree(actual, expected):
    """Return whether results agree, leaves that are no arrays by identity."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return all(
        np.allclose(np.asarray(one), np.asarray(other), rtol=1e-5)
        if hasattr(one, "dtype") and not jnp.issubdtype(one.dtype, jax.dtypes.prng_key)
        else callable(one) or hasattr(one, "dtype") or one == other
        for one, other in pairs
    )


@pytest.fixture
def long_way(monkeypatch):
    """Return a list that grows by one with every call that goes the long way."""
    calls = []
    plain = Executable.__call__

    def counted(self, inputs):
        calls.append(self)
        return plain(self, inputs)

    monkeypatch.setattr(Executable, "__call__", counted)
    return calls


def parallel(**options):
    return alpa.parallelize(step, cluster="host:4", num_stages=1, num_microbatches=1, **options)


def test_the_second_call_like_the_first_goes_straight_to_the_program(long_way):
    running, (state, batch) = parallel(), made()
    expected, _ = made()
    for number in range(3):
        state, metrics = running(state, batch)
        expected, reference = step(expected, batch)
        assert agree((state, metrics), (expected, reference)), number
    assert state["activation"] is jnp.tanh
    assert int(state["count"]) == 6
    assert len(long_way) == 1


def test_arrays_elsewhere_are_placed(long_way):
    running = parallel()
    results = []
    for _ in range(2):
        state, batch = made()
        results.append(running(jax.device_get(state), jax.device_put(batch, jax.devices()[1])))
    assert agree(*results)
    assert len(long_way) == 1


@pytest.mark.parametrize("where", [jnp.asarray, np.asarray])
def test_a_batch_for_the_only_device_is_not_placed_before_the_program(long_way, monkeypatch, where):
    running = alpa.parallelize(step, cluster="host:1")
    state, batch = made()
    expected, _ = made()
    state, _ = running(state, where(batch))
    expected, _ = step(expected, batch)
    monkeypatch.setattr(jax, "device_put", None)
    for _ in range(2):
        state, metrics = running(state, where(batch))
        expected, reference = step(expected, batch)
        assert agree((state, metrics), (expected, reference))
    assert len(long_way) == 1


def test_a_batch_of_the_host_that_is_returned_comes_back_as_an_array_of_the_device(long_way):
    def echo(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - gradient, (loss, x)

    running, w = alpa.parallelize(echo, cluster="host:1"), jnp.eye(4)
    x = np.ones((8, 4), np.float32)
    for _ in range(3):
        w, (_, same) = running(w, x)
        assert isinstance(same, jax.Array)
        assert np.array_equal(same, x)
    assert len(long_way) == 1


def test_state_of_another_kind_between_calls_is_noticed(long_way):
    running, (state, batch) = parallel(), made()
    for _ in range(3):
        state, _ = running(state, batch)
    assert len(long_way) == 1
    held = jax.device_put(state["weights"], jax.devices()[3])  # elsewhere: placed
    moved = {**state, "weights": held}
    expected = step({**state, "weights": jax.device_get(held)}, batch)
    assert agree(running(moved, batch), expected)
    assert len(long_way) == 1
    for other in (jnp.float16, jnp.bfloat16):  # another dtype: planned anew
        state, batch = made()
        state, _ = running(state, batch)
        state["weights"] = jax.tree.map(lambda w, other=other: w.astype(other), state["weights"])
        after, _ = running(state, batch)
        assert jax.tree.leaves(after["weights"])[0].dtype == other
    state, batch = made()
    state, _ = running(state, batch)
    state["weights"]["a"].delete()
    with pytest.raises(alpa.PlanError, match="given away to an earlier step"):
        running(state, batch)


def test_one_array_for_two_inputs_is_copied(long_way):
    running = parallel()
    state, batch = made()
    running(*made())
    shared = jnp.array(state["weights"]["a"])
    state["weights"] = {"a": shared, "b": shared}
    expected = step(state, batch)
    assert agree(running(state, batch), expected)


def test_state_that_was_given_away_is_refused_with_the_reason(long_way):
    running, (state, batch) = parallel(), made()
    state, _ = running(state, batch)
    running(state, batch)
    with pytest.raises(alpa.PlanError, match="given away to an earlier step"):
        running(state, batch)


def test_state_is_kept_where_the_plan_does_not_donate(long_way):
    running, (state, batch) = parallel(donate=False), made()
    state, _ = running(state, batch)
    assert agree(running(state, batch), running(state, batch))
    assert len(long_way) == 1


def test_another_shape_another_leaf_or_tracing_goes_the_long_way(long_way):
    running = parallel()
    state, batch = made()
    assert agree(running(made()[0], batch), step(state, batch))
    assert agree(running(made()[0], batch[:8]), step(state, batch[:8]))
    assert running.plan.program.batch_size == 8
    assert agree(running(made()[0], batch[:8]), step(state, batch[:8]))
    assert len(long_way) == 2
    running.executable.trace("blocking")
    running(made()[0], batch[:8])
    assert len(long_way) == 3
    assert running.last_trace
    running.executable.trace("none")
    other = {**made()[0], "activation": jnp.sin}
    expected = step(other, batch[:8])
    assert agree(running(other, batch[:8]), expected)


@pytest.fixture
def compiled():
    """Return a list that grows with every program that XLA compiles."""
    found = []

    def note(event, *_, **__):
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize("kind", ["number", "array", "made where the plan wants it"])
def test_a_state_with_weak_types_has_its_step_compiled_once(compiled, kind):
    def descend(state, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x * w) ** 2))(state["weight"])
        return {"steps": state["steps"] + 1, "weight": state["weight"] - gradient}, loss

    def make():
        steps = 0 if kind == "number" else jnp.asarray(0)
        return {"steps": steps, "weight": jnp.full(8, 1.0)}  # both are weakly typed

    running, x = alpa.parallelize(descend, cluster="host:2"), jnp.ones(8, jnp.float32)
    state = running.init(make, batch=x) if kind.startswith("made") else make()
    state, _ = running(state, x)
    compiled.clear()
    for _ in range(2):
        state, _ = running(state, x)
    assert not compiled
    assert int(state["steps"]) == 3
    assert np.allclose(state["weight"], 0.75**3)
    running(make(), x)
    compiled.clear()
    running(make(), x)
    assert len(compiled) <= 2  # what removes the weak types


def test_a_step_of_several_tasks_has_no_direct_call(long_way):
    running = alpa.parallelize(step, cluster="host:4", num_stages=1, num_microbatches=2)
    state, batch = made()
    for _ in range(2):
        state, _ = running(state, batch)
    assert len(long_way) == 2
