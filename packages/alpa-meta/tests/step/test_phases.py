"""Forward, backward and update are told apart."""

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.errors import PlanError
from alpa_meta.step.phases import gradient_marker, value_and_grad
from alpa_meta.step.program import Step


def loss(weight, batch):
    return jnp.mean(jnp.tanh(batch @ weight) ** 2)


def program(step, num_microbatches=1):
    shape = jax.ShapeDtypeStruct
    args = (shape((4, 4), jnp.float32), shape((8, 4), jnp.float32))
    return Step(step, args).program(num_microbatches)


def phases_by_primitive(found):
    table: dict[str, list[str]] = {}
    for eqn, phase in zip(found.jaxpr.eqns, found.phases.of_eqn, strict=True):
        table.setdefault(phase, []).append(eqn.primitive.name)
    return table


def plain(weight, batch):
    gradient = jax.grad(loss)(weight, batch)
    return weight - jnp.sqrt(jnp.abs(gradient))


def marked(weight, batch):
    _, gradient = value_and_grad(loss)(weight, batch)
    return weight - jnp.sqrt(jnp.abs(gradient))


@pytest.mark.parametrize(("step", "by"), [(plain, "name stack"), (marked, "marker")])
def test_the_optimiser_is_the_update_and_the_loss_is_not(step, by):
    found = program(step)
    table = phases_by_primitive(found)
    assert found.phases.recognised_by == by
    assert "dot_general" in table["forward"]
    assert "dot_general" in table["forward"] + table["backward"]
    assert {"abs", "sqrt", "sub"} <= set(table["update"])
    assert "dot_general" not in table["update"]


def test_markers_leave_no_trace_in_the_program():
    assert all(eqn.primitive is not gradient_marker for eqn in program(marked).jaxpr.eqns)


def test_a_metric_on_the_examples_beside_the_loss_is_forward():
    def step(weight, batch):
        gradient = jax.grad(loss)(weight, batch)
        return weight - gradient, jnp.sum(jnp.argmax(batch, -1) == 0)

    table = phases_by_primitive(program(step))
    assert "argmax" in table["forward"]


@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_loss_alone_is_computed_from_is_forward_however_many_examples_there_are(batch):
    def step(weight, given):
        def loss(weight):
            made = given @ weight
            return jnp.mean(made**2), jnp.mean(jnp.cos(made))

        gradient, beside = jax.grad(loss, has_aux=True)(weight)
        return weight - gradient, beside

    shape = jax.ShapeDtypeStruct
    args = (shape((4, 4), jnp.float32), shape((batch, 8, 4), jnp.float32))
    found = phases_by_primitive(Step(step, args).program(1))
    assert "cos" in found["forward"]
    assert "div" in found["update"]  # the mean, of a sum over all examples


def test_a_step_without_a_gradient_is_refused():
    with pytest.raises(PlanError, match="none of its .* operations comes from jax.grad"):
        program(lambda weight, batch: weight - loss(weight, batch))


def test_the_marked_gradient_is_the_gradient():
    weight, batch = jnp.eye(4), jnp.ones((2, 4))
    expected = jax.value_and_grad(loss)(weight, batch)
    got = jax.jit(value_and_grad(loss))(weight, batch)
    assert jnp.allclose(got[0], expected[0])
    assert jnp.allclose(got[1], expected[1])
    assert jax.vmap(value_and_grad(loss), (None, 0))(weight, batch[None])[1].shape == (1, 4, 4)


def test_a_gradient_is_found_inside_nested_loops():
    def step(weight, batch):
        def epoch(weight, _):
            def descend(weight, part):
                return weight - jax.grad(loss)(weight, part), None

            return jax.lax.scan(descend, weight, batch.reshape(2, 4, 4))

        return jax.lax.scan(epoch, weight, None, length=3)[0]

    assert "scan" in phases_by_primitive(program(step))["backward"]


def test_a_scope_named_after_a_transposition_is_no_backward_pass():
    def step(weight, batch):
        def named(w):
            with jax.named_scope("conv_transpose_1"):
                return loss(w, batch)

        return weight - jax.grad(named)(weight)

    assert "dot_general" in phases_by_primitive(program(step))["forward"]


def test_constants_that_per_example_gradients_are_scaled_by_do_not_move_them_to_the_update():
    def step(weight, batch):
        def loss_of(weight, x):
            return jnp.sum(jnp.tanh(x @ weight) ** 2)

        gradients = jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(weight, batch)
        squares = jnp.sum(gradients**2, axis=(1, 2)) + jnp.sum(jnp.square(jnp.zeros(3)))
        factors = jnp.minimum(1.0, 0.5 / jnp.sqrt(squares))
        return weight - jnp.einsum("n,nij->ij", factors, gradients)

    found = program(step, 2)
    assert not found.inexact
    assert "sqrt" in phases_by_primitive(found)["backward"]
