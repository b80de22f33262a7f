"""A program in pieces computes what the whole program computes, and keeps its pieces apart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

from alpa_meta.inter_op.scan_cutting import cut_scans
from alpa_meta.inter_op.stacks import stacks_of
from alpa_meta.step.program import Step

LAYERS, WIDTH = 5, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)),
        "b": jax.random.normal(keys[1], (LAYERS, WIDTH)),
    }


BATCH = np.asarray(jax.random.normal(jax.random.key(1), (6, WIDTH)))


def block(x, layer):
    return jnp.tanh(x @ layer["w"] + layer["b"])


def plain(params, batch):
    x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), batch, params)
    return jnp.mean(x**2)


def backwards(params, batch):
    halved = jax.tree.map(lambda p: 0.5 * p, params)
    body = jax.checkpoint(lambda x, layer: (block(x, layer), x.mean()))
    x, means = jax.lax.scan(body, batch, halved, reverse=True)
    return jnp.mean(x**2) + means.max() + jnp.cumsum(means)[2]


def twice(params, batch):
    """Return a loss that runs the same layers twice, and mixes them once."""
    mixed = {"w": params["w"] + params["w"][::-1], "b": params["b"]}
    x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), batch, params)
    x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, mixed)
    return jnp.mean(x**2) + jnp.sum(jnp.outer(params["b"][:, 0], params["b"][:, 1]))


def keyed(params, batch):
    """Return a loss with noise of one key per layer."""
    keys = jax.random.split(jax.random.key(3), LAYERS)

    def body(x, inputs):
        layer, key = inputs
        return block(x, layer) + 0.1 * jax.random.normal(key, (WIDTH,)), None

    x, _ = jax.lax.scan(body, batch, (params, keys))
    return jnp.mean(x**2)


def step_of(loss):
    def step(state, batch):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), (value, gradients["b"])

    state = params()
    return Step(step, ((state, OPTIMIZER.init(state)), BATCH))


@pytest.mark.parametrize(
    ("loss", "bounds"),
    [(backwards, (0, 2, 5)), (twice, (0, 1, 4, 5)), (keyed, (0, 4, 5))],
)
def test_a_program_in_pieces_computes_the_same(loss, bounds):
    step = step_of(loss)
    program = step.program(1)
    stacks = stacks_of(program)
    assert len(stacks) == 1
    cut = cut_scans(program, stacks, [bounds])
    flat = step.flatten(((params(), OPTIMIZER.init(params())), BATCH))
    expected = jax.jit(jaxpr_as_fun(program.closed))(*flat)
    parts = cut.program.input_parts
    given = [flat[p.leaf] if p.stop is None else flat[p.leaf][p.start : p.stop] for p in parts]
    got = jax.jit(jaxpr_as_fun(cut.program.closed))(*given)
    assert len(got) > len(expected)
    for part, value in zip(cut.program.output_parts, got, strict=True):
        whole = expected[part.leaf]
        right = whole if part.stop is None else whole[part.start : part.stop]
        np.testing.assert_allclose(value, right, rtol=2e-5, atol=2e-6)


def test_state_goes_in_and_comes_out_in_pieces_and_is_never_joined():
    program = step_of(plain).program(1)
    cut = cut_scans(program, stacks_of(program), [(0, 2, 5)])
    paths = [leaf.path for leaf in cut.program.inputs]
    assert "state[0]['w'][0:2]" in paths
    assert "state[1][1][0].mu['b'][2:5]" in paths
    assert {leaf.leaf_path for leaf in cut.program.inputs} == {leaf.path for leaf in program.inputs}
    for output, alias in zip(cut.program.outputs, cut.program.aliases, strict=True):
        if alias is not None and output.endswith("]"):
            assert output.split("[")[-1] == paths[alias].split("[")[-1]
    joined = [origin for origin in cut.origins if origin.role == "join"]
    assert len(joined) == 1  # of the gradient that the step returns whole
    roles = {origin.role for origin in cut.origins}
    assert roles == {"whole", "piece", "combine", "join"}


def test_forward_operations_on_a_piece_stand_next_to_its_scan():
    program = step_of(backwards).program(1)
    cut = cut_scans(program, stacks_of(program), [(0, 2, 5)])
    forward = [
        (eqn.primitive.name, origin.start)
        for eqn, origin, phase in zip(
            cut.program.jaxpr.eqns, cut.origins, cut.program.phases.of_eqn, strict=True
        )
        if phase == "forward" and origin.role == "piece" and eqn.primitive.name in ("mul", "scan")
    ]
    scans = [start for name, start in forward if name == "scan"]
    assert scans == [2, 0]  # a reverse scan starts with its last layers
    names = [name for name, _ in forward]
    assert names.index("scan") < len(names) - 1 - names[::-1].index("mul")


def test_scans_are_the_originals_but_for_their_length():
    program = step_of(plain).program(1)
    cut = cut_scans(program, stacks_of(program), [(0, 2, 5)])
    lengths = [e.params["length"] for e in cut.program.jaxpr.eqns if e.primitive.name == "scan"]
    assert sorted(lengths) == [2, 2, 3, 3]


def test_a_scanned_flax_module_and_its_train_state_are_cut_without_a_whole_copy():
    pytest.importorskip("flax")
    from flax import linen
    from flax.training import train_state

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return x + linen.Dense(WIDTH)(linen.gelu(linen.LayerNorm()(x))), None

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            scanned = linen.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
            )
            return scanned()(x, None)[0]

    net = Net()
    state = train_state.TrainState.create(
        apply_fn=net.apply, params=net.init(jax.random.key(0), BATCH), tx=OPTIMIZER
    )

    def step(state, batch):
        def loss(params):
            found: Any = net.apply(params, batch)
            return jnp.mean(found**2)

        gradients = jax.grad(loss)(state.params)
        return state.apply_gradients(grads=gradients)

    program = Step(step, (state, BATCH)).program(2)
    cut = cut_scans(program, stacks_of(program), [(0, 2, 5)])
    assert {origin.role for origin in cut.origins} == {"piece", "whole", "combine"}
    kernels = [leaf.path for leaf in cut.program.inputs if "kernel" in leaf.path]
    assert len(kernels) == 6  # parameter and two moments, in two pieces each
