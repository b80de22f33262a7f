"""What a product asks of the hardware, as jax traces it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_interchange import SubmeshSpec
from alpa_meta.compat import open_jaxpr
from alpa_meta.intra_op.arithmetic import arithmetic
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.operator_seconds import operator_seconds
from alpa_meta.operators import sharding_rule, traffic_bytes
from alpa_meta.step.trace import inline
from cost_model import CostModel, cluster

LARGE = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)


def equation(function, *args):
    return open_jaxpr(inline(jax.make_jaxpr(function)(*args))).eqns[-1]


@pytest.mark.parametrize(
    ("asked", "platform", "found"),
    [
        (None, "gpu", ("tensorfloat32", 1)),
        ("high", "gpu", ("tensorfloat32", 1)),
        ("highest", "gpu", ("float32", 1)),
        (("default", "highest"), "gpu", ("float32", 1)),
        (None, "tpu", ("bfloat16", 1)),
        (None, "cpu", ("float32", 1)),
        ("BF16_BF16_F32_X3", "gpu", ("bfloat16", 3)),
        (lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32, 2, 2, 3), "gpu",
         ("bfloat16", 3)),
    ],
)  # fmt: skip
def test_precision_is_that_of_the_product(asked, platform, found):
    eqn = equation(lambda a, b: lax.dot(a, b, precision=asked), LARGE, LARGE)
    assert arithmetic(eqn, platform) == found


def test_the_default_precision_is_read_as_context_and_from_the_configuration():
    with jax.default_matmul_precision("highest"):
        assert arithmetic(equation(jnp.matmul, LARGE, LARGE), "gpu") == ("float32", 1)
    before = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # not in stubs
    try:
        jax.config.update("jax_default_matmul_precision", "BF16_BF16_F32_X6")
        assert arithmetic(equation(jnp.matmul, LARGE, LARGE), "gpu") == ("bfloat16", 6)
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def test_a_wider_result_is_computed_wide_and_a_float32_sum_of_bfloat16_is_not():
    half = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)

    def dot(a, b):
        return lax.dot(a, b, preferred_element_type=jnp.float32)

    assert arithmetic(equation(dot, half, half), "gpu") == ("bfloat16", 1)
    with jax.enable_x64(True):
        wide = equation(
            lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float64), LARGE, LARGE
        )
    assert arithmetic(wide, "gpu") == ("float64", 1)


def test_convolutions_and_grouped_products_are_read_alike():
    image, kernel = jnp.ones((1, 1, 8, 8)), jnp.ones((1, 1, 3, 3))
    conv = equation(lambda a, b: lax.conv(a, b, (1, 1), "SAME", precision="highest"), image, kernel)
    assert arithmetic(conv, "gpu") == ("float32", 1)
    rows, groups = jnp.ones((8, 4)), jnp.ones((2, 4, 4))
    ragged = equation(lambda a, b: lax.ragged_dot(a, b, jnp.array([4, 4])), rows, groups)
    assert arithmetic(ragged, "gpu") == ("tensorfloat32", 1)


def test_a_default_product_on_h100_is_priced_at_tensorfloat32():
    model = CostModel(cluster("h100:1"))
    mesh = model.logical_mesh(SubmeshSpec(num_hosts=1, devices_per_host=1), (1,), ("x",))
    costs = MeshCosts(mesh, model)

    def seconds(precision):
        eqn = equation(lambda a, b: lax.dot(a, b, precision=precision), LARGE, LARGE)
        rule = sharding_rule(eqn)
        assert rule is not None
        (one,) = operator_seconds(
            costs, eqn, rule, costs.layouts.strategies(rule), False, traffic_bytes(eqn)
        )
        return one - model.device().launch_latency

    assert seconds("highest") / seconds(None) == pytest.approx(494.7 / 66.9)
    assert seconds("TF32_TF32_F32_X3") / seconds(None) == pytest.approx(3)
