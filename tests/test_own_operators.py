"""Operators of the user's own, planned, priced, cut and pipelined like jax's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import alpa_meta as alpa
from alpa_interchange import ShardingRule
from alpa_meta.compat import kernel_name
from alpa_meta.operators import flops, is_heavy, kernel_kind, sharding_rule
from alpa_meta.step.trace import trace

PATH = Path(__file__).resolve().parents[1] / "examples" / "own_kernel.py"


@pytest.fixture(scope="module")
def flash():
    """Return the example, whose rules are registered when it is loaded."""
    spec = importlib.util.spec_from_file_location("own_kernel", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_matmul(name, linear_in):
    """Return a matrix product as a primitive, whose gradients are products by the same."""
    primitive = Primitive(name)
    primitive.def_impl(jnp.matmul)
    primitive.def_abstract_eval(
        lambda a, b: a.update(shape=(a.shape[0], b.shape[1]), weak_type=False)
    )
    mlir.register_lowering(primitive, mlir.lower_fun(jnp.matmul, multiple_results=False))
    left = lambda slope, _, b: primitive.bind(slope, b.T)  # noqa: E731
    right = lambda slope, a, _: primitive.bind(a.T, slope)  # noqa: E731
    ad.defbilinear(primitive, left, right)

    def rule(eqn):
        (m, k), n = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape[1]
        return ShardingRule.parse("m k, k n -> m n", {"m": m, "k": k, "n": n})

    alpa.sharding_rule(name, rule, linear_in=linear_in)
    return primitive


MATMUL = made_matmul("own_matmul", (0, 1))


def product_step(product):
    def loss(weights, batch):
        hidden = jnp.tanh(product(batch, weights[0]))
        return jnp.mean(product(hidden, weights[1]) ** 2)

    def step(weights, batch):
        value, slopes = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, slopes), value

    return step


def weights(size=16):
    return list(jax.random.normal(jax.random.key(0), (2, size, size)) / 4)


def eqns(function, *args):
    return trace(function, *args)[0].jaxpr.eqns


def test_a_registered_product_counts_chooses_and_is_priced_as_a_product():
    shapes = [jax.ShapeDtypeStruct((512, 1024), "float32"), jax.ShapeDtypeStruct((1024, 512), "f4")]
    (own,) = eqns(MATMUL.bind, *shapes)
    (jaxs,) = eqns(jnp.matmul, *shapes)
    assert flops(own) == flops(jaxs) == 2 * 512 * 1024 * 512
    assert is_heavy(own)
    assert kernel_kind(own) == "matmul"


def test_a_step_of_registered_products_is_planned_as_one_of_jaxs_products():
    batch = jax.ShapeDtypeStruct((4096, 4096), "float32")
    state = [jax.ShapeDtypeStruct((4096, 4096), "float32")] * 2
    seconds = [
        alpa.parallelize(product_step(product), cluster="h100:8")
        .plan_for(state, batch)
        .step_seconds
        for product in (MATMUL.bind, jnp.matmul)
    ]
    # 7 % apart: its gradient has one transpose more than that of jax.numpy.matmul
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1)


@pytest.mark.sample(options=1)
@pytest.mark.parametrize("options", [(2, 4), (1, 2), (1, 4), (2, 2)])
def test_registered_products_are_cut_into_microbatches_and_stages(agrees, options):
    stages, parts = options
    batch = jax.random.normal(jax.random.key(1), (8, 16))
    agrees(
        product_step(MATMUL.bind),
        weights(),
        [batch, batch + 1],
        one_device=jax.jit(product_step(jnp.matmul)),
        cluster="host:4",
        num_stages=stages,
        num_microbatches=parts,
        max_mesh_axes=1,
    )


def test_kernels_of_one_primitive_have_rules_of_their_own(flash):
    found = {
        kernel_name(eqn): eqn
        for eqn in eqns(flash.train_step, flash.make_layers(1), flash.make_batch())
        if eqn.primitive.name == "pallas_call"
    }
    forward, backward = found["flash_forward"], found["flash_backward"]
    assert str(sharding_rule(forward)) == "b h q d, b h k d, b h k d -> b h q d, b h q"
    rule = sharding_rule(backward)
    assert rule is not None and len(rule.operands) == 6
    assert flops(forward) == 2 * (2 * 16 * 2 * 8 * 8 * 4)
    assert flops(backward) == 5 * (2 * 16 * 2 * 8 * 8 * 4)
    assert is_heavy(forward)
    assert is_heavy(backward)


def test_flash_attention_is_attention(flash):
    def plain(q, k, v):
        found = jnp.einsum("bhqd,bhkd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        found = jnp.where(jnp.tril(jnp.ones(found.shape[-2:])) > 0, found, -1e30)
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(found), v)

    layers, batch = flash.make_layers(), flash.make_batch()
    both = jax.jit(jax.value_and_grad(flash.loss_of), static_argnums=2)
    values = [both(layers, batch, attend) for attend in (flash.attention, plain)]
    for own, jaxs in zip(*map(jax.tree.leaves, values), strict=True):
        assert jnp.allclose(own, jaxs, rtol=1e-4, atol=1e-6)


@pytest.mark.sample(options=1)
@pytest.mark.parametrize("options", [(2, 4), (1, 2), (1, 4), (2, 2)])
def test_flash_attention_is_cut_into_microbatches_and_stages(flash, agrees, options):
    stages, parts = options
    step = agrees(
        flash.train_step,
        flash.make_layers(),
        [flash.make_batch()] * 2,
        cluster="host:4",
        num_stages=stages,
        num_microbatches=parts,
        max_mesh_axes=1,
    )
    assert not any(one.replicated_ops for one in step.plan.shardings)


@pytest.mark.sample(slices=1)
@pytest.mark.parametrize("slices", [(4, 12), (8, 4, 4)])
def test_flash_attention_is_cut_into_token_slices(flash, slices):
    with jax.enable_x64(True):
        layers, batch = jax.tree.map(
            lambda leaf: leaf.astype("float64"), (flash.make_layers(), flash.make_batch(2, 16))
        )
        step = alpa.parallelize(
            flash.train_step,
            cluster="host:4",
            donate=False,
            num_stages=2,
            num_microbatches=len(slices) - 1,
            token_slices=slices,
        )
        expected, found = jax.jit(flash.train_step)(layers, batch), step.gather(step(layers, batch))
        for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            assert jnp.allclose(two, one, rtol=1e-10, atol=1e-12)
        assert step.executable.audit().ok
