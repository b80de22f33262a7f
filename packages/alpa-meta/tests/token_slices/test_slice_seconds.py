"""What slices take is the work of their rows with the keys before them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_models import TOKENS, Model, batch, loss, parameters

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
