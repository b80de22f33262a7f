"""A Pallas kernel in a step: without a rule it runs on whole arrays, with one on parts of them.

Run with: python examples/own_kernel.py
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import alpa_meta as alpa
from alpa_interchange import ShardingRule

jax.config.update("jax_num_cpu_devices", 8)


@jax.custom_vjp
def row_softmax(x):
    """Return the softmax of every row, computed row by row."""

    def kernel(x_ref, out_ref):
        row = jnp.exp(x_ref[...] - jnp.max(x_ref[...]))
        out_ref[...] = row / jnp.sum(row)

    block = pl.BlockSpec((1, x.shape[1]), lambda row: (row, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # interpret: host devices have no Pallas compiler
    return pl.pallas_call(
        kernel, shape, grid=x.shape[:1], in_specs=[block], out_specs=block, interpret=True
    )(x)


def forward(x):
    y = row_softmax(x)
    return y, y


def backward(y, gradient):
    return (y * (gradient - jnp.sum(y * gradient, axis=1, keepdims=True)),)


row_softmax.defvjp(forward, backward)


def rule(eqn):
    """Rows may be cut, columns are read whole."""
    rows, columns = eqn.invars[0].aval.shape
    return ShardingRule.parse("r c -> r c", {"r": rows, "c": columns}, replicated=("c",))


# all pallas_calls are one primitive: with several kernels, let both functions look at eqn.params
alpa.sharding_rule("pallas_call", rule, lambda call: [row_softmax(call.operands[0])])


def train_step(weight, batch):
    def loss_of(weight):
        return jnp.mean((row_softmax(batch["x"] @ weight) - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weight)
    return weight - 10.0 * gradient, loss


step = alpa.parallelize(train_step, cluster="host:8", preset="dp")
key = jax.random.key(1)
batch = {"x": jax.random.normal(key, (64, 32)), "y": jax.nn.one_hot(jnp.arange(64) % 16, 16)}
weight = jnp.zeros((32, 16))
for number in range(20):
    weight, loss = step(weight, batch)
    if number % 10 in (0, 9):
        print(f"step {number}: loss {float(loss):.4f}")
print("operators on whole arrays:", step.plan.shardings[0].replicated_ops or "none")
print(step.audit(weight, batch))
