"""Training steps by gradient descent."""

import jax


def descend(loss):
    """Return a step of gradient descent on `loss(params, batch)`."""

    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step
