"""Ops that layers are clustered from weigh their seconds on one device."""

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.inter_op.layer_work import eqn_seconds, one_device, op_sequence
from cost_model import cluster

V100 = cluster("p3.16xlarge:8")


def eqns_of(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.make_jaxpr(function)(*arguments).jaxpr.eqns


def test_an_elementwise_op_weighs_the_bytes_it_writes():
    (eqn,) = eqns_of(jnp.exp, (1000, 1000))
    bandwidth = V100.host_groups[0].device.memory_bandwidth
    assert op_sequence([eqn], V100).seconds == pytest.approx([4e6 / bandwidth])


def test_a_product_weighs_more_in_float32_than_in_float16():
    def times(dtype):
        half = [jax.ShapeDtypeStruct((2048, 2048), dtype)] * 2
        (eqn,) = jax.make_jaxpr(jnp.dot)(*half).jaxpr.eqns
        return op_sequence([eqn], V100).seconds[0]

    assert times(jnp.float32) > 4 * times(jnp.float16)


def test_a_scan_weighs_its_body_as_often_as_it_runs():
    def body(x, _):
        return jnp.tanh(x @ x), None

    (scan,) = eqns_of(lambda x: jax.lax.scan(body, x, None, length=5)[0], (256, 256))
    costs = one_device(V100)
    inner = sum(eqn_seconds(eqn, costs) for eqn in scan.params["jaxpr"].eqns)
    assert eqn_seconds(scan, costs) == pytest.approx(5 * inner)
