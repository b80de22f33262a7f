"""What slices take is the work of their rows with the keys before them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_models import TOKENS, Model, batch, loss, parameters
from jax import lax

from alpa_meta.inter_op.layer_work import eqn_seconds, one_device
from alpa_meta.step.program import Step
from alpa_meta.token_slices.analysis import analysed
from alpa_meta.token_slices.places import Slices
from alpa_meta.token_slices.slice_seconds import slice_seconds
from cost_model import cluster

CELLS = 6


@pytest.fixture(scope="module", params=[Model(), Model(scan=True, num_layers=2)], ids=str)
def priced(request):
    """The program of a model, the costs of a device, and the seconds of its slices."""
    model = request.param

    def step(params, given):
        return jax.value_and_grad(loss(model))(params, given)

    with jax.enable_x64(True):
        program = Step(step, (parameters(model), batch(model)), batch_argnums=(1,)).program(1)
        holds = [leaf.role == "batch" for leaf in program.inputs]
        halves = Slices((TOKENS // 2, TOKENS // 2))
        analysis = analysed(program.closed, program.phases.of_eqn, holds, halves)
        costs = one_device(cluster("h100:1x1"))
        yield program, costs, slice_seconds(analysis, costs, CELLS)


def test_a_slice_of_all_tokens_takes_what_the_program_does(priced):
    program, costs, table = priced
    whole = sum(eqn_seconds(eqn, costs) for eqn in program.jaxpr.eqns)
    assert table[0, -1] == pytest.approx(whole, rel=0.2)


def test_longer_and_later_slices_take_longer(priced):
    _, _, table = priced
    for start in range(CELLS):
        assert (np.diff(table[start, start + 1 :]) > 0).all()
    later = np.diagonal(table, 1)
    assert (np.diff(later) >= 0).all() and later[-1] > later[0]


def test_pairs_that_are_no_slice_take_nothing(priced):
    assert not np.tril(priced[2]).any()


def test_slices_that_fill_no_tile_take_as_long_as_those_that_do():
    def step(weights, given):
        return jax.value_and_grad(lambda w: jnp.sum((given @ w) ** 2))(weights)

    shapes = [jax.ShapeDtypeStruct(size, "bfloat16") for size in ((8192, 8192), (1, 2048, 8192))]
    program = Step(step, tuple(shapes), batch_argnums=(1,)).program(1)
    holds = [leaf.role == "batch" for leaf in program.inputs]
    analysis = analysed(program.closed, program.phases.of_eqn, holds, Slices((1024, 1024)))
    table = slice_seconds(analysis, one_device(cluster("h100:1x1")), 32)
    tile, half_a_tile = table[0, 2], table[0, 1]  # 128 and 64 rows
    assert half_a_tile > 0.7 * tile  # the weights' gradient, a sum over rows, fills its tiles
    assert table[0, -1] < 16 * tile


LONG, WIDTH, BLOCK = 8192, 128, 1024


def plain(queries, keys, values):
    scores = jnp.einsum("btd,bsd->bts", queries, keys)
    return jnp.einsum("bts,bsd->btd", softmax(scores, jnp.arange(LONG), 0), values)


def softmax(scores, rows, first):
    seen = rows[:, None] >= first + jnp.arange(scores.shape[-1])
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))


def cut_up(value):
    return jnp.moveaxis(value.reshape(len(value), -1, BLOCK, WIDTH), 1, 0)


def by_queries(queries, keys, values):
    def block(given):
        number, queries = given
        weigh = softmax(
            jnp.einsum("btd,bsd->bts", queries, keys), number * BLOCK + jnp.arange(BLOCK), 0
        )
        return jnp.einsum("bts,bsd->btd", weigh, values)

    found = lax.map(block, (jnp.arange(LONG // BLOCK), cut_up(queries)))
    return jnp.moveaxis(found, 0, 1).reshape(queries.shape)


def by_keys(queries, keys, values):
    def advance(state, given):
        (m, l, out), (number, keys, values) = state, given
        scores = jnp.einsum("btd,bsd->bts", queries, keys)
        seen = jnp.arange(LONG)[:, None] >= number * BLOCK + jnp.arange(BLOCK)
        scores = jnp.where(seen, scores, -jnp.inf)
        most = jnp.maximum(m, scores.max(-1))
        p, kept = jnp.exp(scores - most[..., None]), jnp.exp(m - most)
        made = jnp.einsum("bts,bsd->btd", p, values)
        return (most, l * kept + p.sum(-1), out * kept[..., None] + made), None

    zeros = jnp.zeros(queries.shape[:2], queries.dtype)
    start = zeros - jnp.inf, zeros, jnp.zeros_like(queries)
    blocks = jnp.arange(LONG // BLOCK), cut_up(keys), cut_up(values)
    (_, l, out), _ = lax.scan(advance, start, blocks)
    return out / l[..., None]


def prices(attend):
    """Return the seconds of the program of an attention, and of its slices of whole blocks."""

    def step(weights, x):
        def made(weights):
            return jnp.sum(attend(*(x @ weights[name] for name in "qkv")) ** 2)

        return jax.value_and_grad(made)(weights)

    weights = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32") for name in "qkv"}
    tokens = jax.ShapeDtypeStruct((1, LONG, WIDTH), "float32")
    program = Step(step, (weights, tokens), batch_argnums=(1,)).program(1)
    holds = [leaf.role == "batch" for leaf in program.inputs]
    halves = Slices((LONG // 2, LONG // 2))
    analysis = analysed(program.closed, program.phases.of_eqn, holds, halves)
    costs = one_device(cluster("h100:1x1"))
    whole = sum(eqn_seconds(eqn, costs) for eqn in program.jaxpr.eqns)
    return whole, slice_seconds(analysis, costs, LONG // BLOCK)


@pytest.mark.parametrize("attend", [by_queries, by_keys])
def test_slices_of_block_loops_take_the_share_that_those_of_plain_attention_do(attend):
    (_, expected), (whole, table) = prices(plain), prices(attend)
    assert table[0, -1] == pytest.approx(whole, rel=0.05)
    shares, of_plain = table / table[0, -1], expected / expected[0, -1]
    np.testing.assert_allclose(shares, of_plain, atol=0.1)
    assert shares[0, 1] < 1.2 * of_plain[0, 1]  # one block is one iteration, not all of them
