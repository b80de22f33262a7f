"""Which values are stacked along scanned layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa_meta.inter_op.stacks import even_bounds, passages, stacks_of
from alpa_meta.step.program import Step
from alpa_meta.step.trace import trace

LAYERS, WIDTH = 6, 4
PARAMS = {"w": np.ones((LAYERS, WIDTH, WIDTH), np.float32), "head": np.ones(WIDTH, np.float32)}
BATCH = np.ones((8, WIDTH), np.float32)


OPTIMIZER = optax.adam(1e-2)


def step_of(loss):
    def step(state, batch):
        params, moments = state
        gradients = jax.grad(loss)(params, batch)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    return Step(step, ((PARAMS, OPTIMIZER.init(PARAMS)), BATCH))


def scanned(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["w"])
    return jnp.mean((x @ params["head"]) ** 2)


def test_parameters_moments_and_gradients_of_a_scan_are_one_stack():
    program = step_of(scanned).program(2)
    (stack,) = stacks_of(program)
    assert stack.length == LAYERS
    inputs = zip(program.jaxpr.invars, program.inputs, strict=True)
    held = {leaf.path for var, leaf in inputs if var in stack.members}
    assert held == {"state[0]['w']", "state[1][0].mu['w']", "state[1][0].nu['w']"}


def test_a_scan_over_the_batch_is_no_stack():
    def over_time(params, batch):
        x, _ = jax.lax.scan(lambda c, x: (jnp.tanh(c @ params["w"][0] + x), None), BATCH[0], batch)
        return jnp.mean((x @ params["head"]) ** 2)

    assert stacks_of(step_of(over_time).program(1)) == ()


def test_a_loop_that_picks_its_layers_by_a_count_is_a_stack():
    def counted(params, batch):
        x = jax.lax.fori_loop(0, LAYERS, lambda k, x: jnp.tanh(x @ params["w"][k]), batch)
        return jnp.mean((x @ params["head"]) ** 2)

    (stack,) = stacks_of(step_of(counted).program(1))
    assert stack.length == LAYERS


def test_a_light_scan_stays_whole():
    def loss(params, batch):
        total, _ = jax.lax.scan(lambda t, w: (t + w.sum(), None), 0.0, params["w"])
        x = batch
        for _ in range(8):
            x = jnp.tanh(x @ jnp.ones((WIDTH, 64))) @ jnp.ones((64, WIDTH))
        return jnp.mean((x @ params["head"]) ** 2) + total

    assert stacks_of(step_of(loss).program(1)) == ()


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: jnp.tanh(x), [({0}, {0}, None)]),
        (lambda x: x.sum(), [({0}, set(), "add")]),
        (lambda x: x.max(axis=0), [({0}, set(), "max")]),
        (lambda x: x.sum(axis=1), [({0}, {0}, None)]),
        (lambda x: x.reshape(6, 8), [({0}, {0}, None)]),
        (lambda x: x.reshape(48), []),
        (lambda x: x.transpose(1, 0, 2), []),
        (lambda x: x[:, :2], [({0}, {0}, None)]),
        (lambda x: jnp.concatenate([x, x], axis=1), [({0, 1}, {0}, None)]),
        (lambda x: jnp.concatenate([x, x]), []),
        (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))), [({0}, {0}, None)]),
        (lambda x: x[::-1], []),
        (lambda x: jnp.cumsum(x, axis=0), []),
    ],
)
def test_dim_0_passes_or_is_reduced_or_needs_the_whole(function, found):
    jaxpr, _ = trace(function, np.ones((6, 4, 2), np.float32))
    eqn = jaxpr.jaxpr.eqns[-1]
    ways = [(set(way.operands), set(way.results), way.reduction) for way in passages(eqn)]
    assert [way for way in ways if 0 in way[0]] == found


def test_pieces_are_equal_where_a_divisor_allows():
    assert even_bounds(12) == tuple(range(13))
    assert even_bounds(96) == tuple(range(0, 97, 6))
    assert even_bounds(80)[1] == 5
    assert even_bounds(7, most=4) == (0, 1, 3, 5, 7)
    assert even_bounds(17)[-1] == 17
    assert len(even_bounds(17)) == 17
