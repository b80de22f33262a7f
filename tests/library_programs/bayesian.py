"""Training steps in the idiom of numpyro's examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from library_programs.batches import WIDTH, points


def _regression(x, y):
    weight = numpyro.sample("weight", dist.Normal(0, 1).expand([WIDTH]).to_event(1))
    bias = numpyro.sample("bias", dist.Normal(0, 1))
    with numpyro.plate("examples", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ weight + bias, 0.5), obs=y)


def variational_inference():
    """A sum over the data and a term of the prior; one draw of the guide per step."""
    batch = points()
    guide = AutoNormal(_regression)
    svi = SVI(_regression, guide, optax.adam(1e-2, eps=1e-3), Trace_ELBO())
    state = svi.init(jax.random.PRNGKey(0), batch["x"], batch["y"])

    def step(state, batch):
        return svi.update(state, batch["x"], batch["y"])

    return step, state, batch


def amortised_inference():
    """A guide that encodes each example; latent variables of the examples in a plate."""
    batch = points()["x"]

    def model(x):
        loading = numpyro.param("loading", 0.1 * jnp.ones((2, WIDTH)))
        with numpyro.plate("examples", x.shape[0]):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
            numpyro.sample("x", dist.Normal(z @ loading, 1.0).to_event(1), obs=x)

    def guide(x):
        encoder = numpyro.param("encoder", 0.1 * jnp.ones((WIDTH, 2)))
        with numpyro.plate("examples", x.shape[0]):
            numpyro.sample("z", dist.Normal(x @ encoder, 0.5).to_event(1))

    svi = SVI(model, guide, optax.adam(1e-2, eps=1e-3), Trace_ELBO())
    state = svi.init(jax.random.PRNGKey(0), batch)
    return svi.update, state, batch
