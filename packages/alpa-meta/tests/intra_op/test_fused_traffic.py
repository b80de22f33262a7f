"""The bytes that operators move, fused as XLA fuses: by hand, and beside compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from alpa_meta import corpus
from alpa_meta.compat import Literal, open_jaxpr
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.intra_op.fused_traffic import fused_traffic
from alpa_meta.intra_op.other_sizes import others_of
from alpa_meta.intra_op.stage_problem import StageEqns
from alpa_meta.options import Options
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.step.program import Step
from alpa_meta.step.trace import inline
from cost_model import cluster

FLOATS = jax.ShapeDtypeStruct((64, 64), jnp.float32)
WHOLE = 4.0 * 64 * 64  # bytes


def stage(function, *args):
    """Return the equations of `function`, whose results leave for another program."""
    jaxpr = open_jaxpr(inline(jax.make_jaxpr(function)(*args)))
    results = frozenset(atom for atom in jaxpr.outvars if not isinstance(atom, Literal))
    return StageEqns(
        eqns=jaxpr.eqns,
        phases=["forward"] * len(jaxpr.eqns),
        keys=[None] * len(jaxpr.eqns),
        state=frozenset(),
        carried=[],
        kept=results,
        accumulated=frozenset(),
        num_microbatches=1,
    )


def moved(function, *args):
    """Return [(primitive, bytes)] of the operators that move any."""
    found = stage(function, *args)
    traffic = fused_traffic(found, others_of(found, ()))
    sizes = [(eqn.primitive.name, *traffic[eqn]) for eqn in found.eqns]
    return [(name, size) for name, size in sizes if size]


def test_a_chain_of_elementwise_operators_reads_its_inputs_once_and_writes_once():
    def chain(x, y):
        return jnp.tanh(x + y) * x + jnp.sin(y)

    assert moved(chain, FLOATS, FLOATS) == [("add", 3 * WHOLE)]


def test_what_a_product_reads_is_written_first():
    assert moved(lambda x: jnp.tanh(x) @ jnp.cos(jnp.sin(x)), FLOATS) == [
        ("tanh", 2 * WHOLE),
        ("cos", 2 * WHOLE),
        ("dot_general", 3 * WHOLE),
    ]


def test_a_reduction_computes_what_it_reads():
    assert moved(lambda x, y: jnp.sum(x * y, axis=1), FLOATS, FLOATS) == [
        ("reduce_sum", 2 * WHOLE + 4 * 64)
    ]


def test_a_softmax_reads_its_scores_in_three_kernels_and_writes_once():
    found = moved(lambda x: jax.nn.softmax(0.5 * x, axis=-1), FLOATS)
    rows = 4.0 * 64
    assert found == [
        ("reduce_max", WHOLE + rows),
        ("reduce_sum", WHOLE + 2 * rows),
        ("div", 2 * WHOLE + 2 * rows),
    ]


def test_a_broadcast_is_computed_where_it_is_read():
    row = jax.ShapeDtypeStruct((64,), jnp.float32)
    assert moved(lambda x, y: x + y[None, :], FLOATS, row) == [("add", 2 * WHOLE + 4 * 64)]


def test_a_slice_reads_its_part():
    assert moved(lambda x: 2 * x[:16], FLOATS) == [("mul", 2 * WHOLE / 4)]


def test_of_what_is_gathered_no_more_is_computed():
    numbers = jax.ShapeDtypeStruct((16,), jnp.int32)

    def rows(table, numbers):
        return table.astype(jnp.bfloat16).at[numbers].get(mode="promise_in_bounds")

    found = dict(moved(rows, FLOATS, numbers))
    assert "convert_element_type" not in found
    assert found["gather"] == 2 * 2 * 16 * 64


@pytest.mark.parametrize("num_kernels", [1, 2, 3, 4, 5])
def test_a_value_is_stored_where_that_moves_less(num_kernels):
    def kernels(x, y):
        total = x + y
        return [jnp.sum(total * (k + 2), axis=1) for k in range(num_kernels)]

    found = moved(kernels, FLOATS, FLOATS)
    again, stored = 2 * num_kernels * WHOLE, (3 + num_kernels) * WHOLE
    results = num_kernels * 4 * 64
    assert sum(size for _, size in found) == min(again, stored) + results
    assert ("add" in dict(found)) == (stored <= again)


def test_other_sizes_move_in_proportion():
    def loss(x, y):
        return jnp.sum(jax.nn.softmax(x @ y) ** 2, axis=-1)

    half = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    here, there = stage(loss, FLOATS, FLOATS), stage(loss, half, FLOATS)
    traffic = fused_traffic(here, others_of(here, (there,)))
    alone = fused_traffic(there, others_of(there, ()))
    for eqn, twin in zip(here.eqns, there.eqns, strict=True):
        assert traffic[eqn][1] == alone[twin][0]


@pytest.mark.parametrize("function", [
    lambda x, y: jnp.tanh(x + y) * x + jnp.sin(y),
    lambda x, y: jnp.sum(x * y + 1, axis=1),
    lambda x, y: (x @ jnp.sin(y)) * 2 + x,
    lambda x, y: jnp.max(x, axis=1, keepdims=True) + y,
])  # fmt: skip
def test_compiled_programs_move_as_many_bytes(function):
    found = sum(size for _, size in moved(function, FLOATS, FLOATS))
    compiled = jax.jit(function).lower(FLOATS, FLOATS).compile().cost_analysis()
    assert compiled is not None
    assert found == pytest.approx(compiled["bytes accessed"], rel=0.15)


@pytest.mark.sample(name=1)
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_host_devices_move_what_each_operator_does(name):
    model = corpus.build(name, "tiny")
    program = Step(model.train_step, (model.state, model.batch)).program(1)
    outlook, _ = outlook_of(program, Options(), cluster("host:1"))
    whole = stage_scope(outlook.program, outlook.staging, 0, 1).eqns
    fused, apart = (
        sum(bytes[0] for bytes in fused_traffic(whole, others_of(whole, ()), platform).values())
        for platform in ("gpu", "cpu")
    )
    compiled = jax.jit(model.train_step).lower(model.state, model.batch).compile().cost_analysis()
    assert compiled is not None
    assert apart == pytest.approx(compiled["bytes accessed"], rel=0.2)
    assert fused < 0.8 * compiled["bytes accessed"]


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def test_attention_in_one_kernel_moves_its_operands_and_result_alone():
    heads = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.float32)
    one = 4.0 * 2 * 512 * 4 * 64  # bytes
    found = stage(attention, heads, heads, heads)
    written = sum(size for (size,) in fused_traffic(found, others_of(found, ())).values())
    inside = fused_traffic(found, others_of(found, ()), "gpu", attends=True)
    products = [inside[eqn][0] for eqn in found.eqns if eqn.primitive.name == "dot_general"]
    assert products == [2 * one, 2 * one]
    # what is left are the sums and maxima of rows
    assert sum(size for (size,) in inside.values()) < 1.1 * sum(products) < written / 4


def test_products_without_batches_of_heads_are_not_attention():
    found = stage(lambda x, y: jnp.tanh(x @ y) @ x, FLOATS, FLOATS)
    plain = fused_traffic(found, others_of(found, ()))
    assert fused_traffic(found, others_of(found, ()), "gpu", attends=True) == plain
