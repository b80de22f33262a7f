"""Literals of the whole batch, and constants computed once per step."""

import jax
import jax.numpy as jnp

from alpa_meta.compat import Literal
from alpa_meta.step.program import Step

SHAPE = jax.ShapeDtypeStruct


def program(step, state, num_microbatches):
    return Step(step, (state, SHAPE((8, 4), jnp.float32))).program(num_microbatches)


def descend(state, batch):
    gradient = jax.grad(lambda w: jnp.mean(batch @ w))(state["w"])
    return state["w"] - gradient


def test_a_returned_number_of_examples_is_that_of_the_whole_batch():
    def step(state, batch):
        return {"w": descend(state, batch)}, batch.shape[0]

    state = {"w": SHAPE((4, 4), jnp.float32)}
    for count in (1, 2, 8):
        result = program(step, state, count).jaxpr.outvars[1]
        assert isinstance(result, Literal)
        assert int(result.val) == 8


def test_a_counter_in_the_state_adds_the_whole_batch():
    def step(state, batch):
        return {"w": descend(state, batch), "seen": state["seen"] + batch.shape[0]}

    state = {"w": SHAPE((4, 4), jnp.float32), "seen": SHAPE((), jnp.int32)}
    for count in (1, 4, 8):
        found = program(step, state, count)
        (adding,) = [
            eqn
            for eqn, phase in zip(found.jaxpr.eqns, found.phases.of_eqn, strict=True)
            if phase == "update" and eqn.primitive.name == "add"
        ]
        (number,) = [int(atom.val) for atom in adding.invars if isinstance(atom, Literal)]
        assert number == 8


def test_what_does_not_depend_on_the_batch_is_computed_again_in_the_update():
    def step(state, batch):
        key, used = jax.random.split(state["key"])
        noise = jax.random.normal(used, (4, 4))
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(batch @ (w + noise))))(state["w"])
        return {"w": state["w"] - gradient, "key": key}

    state = {"w": SHAPE((4, 4), jnp.float32), "key": jax.random.key(0)}

    def splits(count):
        found = program(step, state, count)
        pairs = zip(found.jaxpr.eqns, found.phases.of_eqn, strict=True)
        return sorted(phase for eqn, phase in pairs if eqn.primitive.name == "random_split")

    assert splits(1) == ["forward"]
    assert splits(2) == ["forward", "update"]
