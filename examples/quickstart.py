import jax
import jax.numpy as jnp
import optax

import alpa_meta as alpa

jax.config.update("jax_num_cpu_devices", 8)  # eight host devices on any machine
adam = optax.adam(1e-2)


def make_state(key):
    up, down = jax.random.normal(key, (2, 64, 64)) / 8
    weights = {"up": up, "down": down}
    return {"weights": weights, "adam": adam.init(weights)}


@alpa.parallelize(cluster="host:8")
def train_step(state, batch):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(batch @ weights["up"]) @ weights["down"] - batch) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    updates, moments = adam.update(gradients, state["adam"])
    return {"weights": optax.apply_updates(state["weights"], updates), "adam": moments}, loss


batch = jax.random.normal(jax.random.key(1), (128, 64))
state = train_step.init(make_state, jax.random.key(0))  # born sharded
for step in range(100):
    state, loss = train_step(state, batch)
    if step in (0, 99):
        print(f"step {step}: loss {loss:.3f}")
print(train_step.plan.shardings[0].mesh.logical.shape, state["weights"]["up"].sharding.spec)
