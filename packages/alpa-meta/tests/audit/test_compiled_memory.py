"""The planned peak of a small step beside XLA's own memory analysis of it, on one host device."""

import jax
import jax.numpy as jnp
import pytest

import alpa_meta

ORDER: dict[str, str | bool] = {
    "xla_cpu_enable_concurrency_optimized_scheduler": False
}  # that takes least memory


def normed(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def perceptron(weights, x):
    for first, second in weights:
        x = x + jax.nn.gelu(normed(x) @ first) @ second
    return x


def step(weights, batch):
    gradients = jax.grad(lambda weights: jnp.mean(perceptron(weights, batch) ** 2))(weights)
    return jax.tree.map(lambda weight, sent: weight - 0.1 * sent, weights, gradients)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def compared(step, weights, batch):
    """Return the planned and the compiled peak of a step, in bytes."""
    options = alpa_meta.Options(
        num_stages=1, num_microbatches=1, recompute="none", memory=1e12, cache=False
    )
    planned = alpa_meta.parallelize(step, cluster="host:1", options=options).lower(weights, batch)
    memory = sum(planned.planned.plan.shardings[0].memory.values()) + 4.0 * batch.size
    found = jax.jit(step, donate_argnums=0).lower(weights, batch).compile(ORDER).memory_analysis()
    assert found is not None
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
    return memory, found.argument_size_in_bytes + fresh + found.temp_size_in_bytes


def trained(apply):
    """Return a step by gradient descent; it also returns the loss."""

    def step(weights, batch):
        loss, gradients = jax.value_and_grad(lambda w: jnp.mean(apply(w, batch) ** 2))(weights)
        return jax.tree.map(lambda weight, sent: weight - 0.1 * sent, weights, gradients), loss

    return step


def test_the_planned_peak_of_a_perceptron_is_within_a_tenth_of_the_compiled_one():
    weights, batch = [(shape(256, 1024), shape(1024, 256))] * 4, shape(8 * 1024, 256)
    planned, compiled = compared(step, weights, batch)
    assert planned == pytest.approx(compiled, rel=0.1)


def convolved(weights, x):
    for weight in weights:
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            jax.nn.relu(x * 1.1 + 0.1), weight, (1, 1), "SAME", dimension_numbers=dims
        )
    return x


def test_the_planned_peak_of_convolutions_is_within_three_percent_of_the_compiled_one():
    weights, images = [shape(3, 3, 32, 32)] * 8, shape(16, 32, 32, 32)
    planned, compiled = compared(trained(convolved), weights, images)
    assert planned == pytest.approx(compiled, rel=0.03)
