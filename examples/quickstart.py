import jax
import jax.numpy as jnp
import optax

import alpa_meta as alpa

jax.config.update("jax_num_cpu_devices", 8)  # eight host devices on any machine
sgd = optax.sgd(10.0)


def make_state(key):
    weights = jax.random.normal(key, (2, 64, 64)) / 8
    return weights, sgd.init(weights)


def loss_of(weights, x):
    return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - x) ** 2)


@alpa.parallelize
def train_step(state, x):
    weights, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(weights, x)
    updates, moments = sgd.update(gradients, moments)
    return (optax.apply_updates(weights, updates), moments), loss


state = train_step.init(make_state, jax.random.key(0))  # each device makes its own part
for step in range(101):
    state, loss = train_step(state, jax.random.normal(jax.random.key(step), (128, 64)))
    if step % 50 == 0:
        print(f"step {step}: loss {loss:.3f}")
print("planned for", train_step.plan.cluster.name)
