"""A program traced at one example gets its scaling from the one traced at two."""

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.compat import open_jaxpr
from alpa_meta.microbatch.scaling import CONSTANT, Scaling, batch_scaling
from alpa_meta.microbatch.single_example import scaling_of_one
from alpa_meta.step.trace import trace

PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.ones(4), "row": jnp.ones((1, 4))}


def traced(function, batch):
    return trace(
        lambda *leaves: jax.tree.leaves(
            function(jax.tree.unflatten(jax.tree.structure(PARAMS), leaves[:-1]), leaves[-1])
        ),
        *jax.tree.leaves(PARAMS),
        jax.ShapeDtypeStruct((batch, 3), jnp.float32),
    )[0]


def scalings(function):
    """Return the scaling of each result at one example, and at two."""
    inputs = [CONSTANT] * 3 + [Scaling("example", 0, 0)]
    one, two = traced(function, 1), traced(function, 2)
    known = batch_scaling(two, traced(function, 4), inputs)
    found, pairs = scaling_of_one(one, two, known)
    for mine, theirs in pairs.items():
        ours, other = open_jaxpr(one).eqns[mine], open_jaxpr(two).eqns[theirs]
        assert ours.primitive is other.primitive
    return (
        [found[var] for var in open_jaxpr(one).outvars],
        [known[var] for var in open_jaxpr(two).outvars],
    )


def mean_loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    normal = hidden - hidden.mean(-1, keepdims=True)
    return jnp.mean((normal * params["row"]) ** 2)


def sum_loss(params, x):
    return jnp.sum(jax.nn.softmax(x @ params["w"] * params["row"]) ** 2)


@pytest.mark.parametrize("loss", [mean_loss, sum_loss])
def test_gradients_of_broadcast_parameters_are_recognised_though_nothing_is_summed(loss):
    one, two = scalings(jax.value_and_grad(loss))
    assert one == two
    assert {scaling.form for scaling in one} <= {"reduced", "constant"}


def test_per_example_results_keep_their_batch_dim():
    one, two = scalings(lambda params, x: jnp.tanh(x @ params["w"]))
    assert one == two == [Scaling("example", 0, 0)]


def test_programs_of_other_operations_do_not_match():
    inputs = [CONSTANT] * 3 + [Scaling("example", 0, 0)]
    one = traced(lambda params, x: jnp.sin(x).sum(), 1)
    two = traced(lambda params, x: jnp.cos(x).sum(), 2)
    assert scaling_of_one(one, two, batch_scaling(two, two, inputs)) is None
