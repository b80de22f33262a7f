from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_meta.operators.convolution import host_orders

KEY = jax.random.key(0)
CASES: dict[str, dict[str, Any]] = {
    "same": {"padding": "SAME"},
    "valid 1x1": {"padding": "VALID", "window": (1, 1)},
    "strided": {"padding": "SAME", "window_strides": (2, 2)},
    "patches": {"padding": "VALID", "window": (4, 4), "window_strides": (4, 4)},
    "dilated window": {"padding": "SAME", "rhs_dilation": (2, 1)},
    "grouped": {"padding": "SAME", "feature_group_count": 2},
    "depthwise": {"padding": "SAME", "feature_group_count": 8, "out": 16},
    "transposed": {"padding": ((1, 2), (2, 1)), "lhs_dilation": (2, 2)},
    "causal": {"padding": ((2, 0), (0, 2))},
}


@pytest.mark.parametrize("case", CASES)
def test_convolutions_are_sharded_by_batch_channel_group_and_space(check, case):
    options = dict(CASES[case])
    window, out = options.pop("window", (3, 3)), options.pop("out", 4)
    groups = options.get("feature_group_count", 1)
    options.setdefault("window_strides", (1, 1))
    images = jax.random.normal(KEY, (2, 8, 8, 8))
    kernel = jax.random.normal(KEY, (*window, 8 // groups, out))

    def function(images, kernel):
        return lax.conv_general_dilated(
            images, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
        )

    done = check(function, (images, kernel), only="conv_general_dilated", count=6)
    assert done["conv_general_dilated"] > 3


def test_gradients_of_a_grouped_convolution_use_batch_groups(check):
    images = jax.random.normal(KEY, (4, 6, 8))
    kernel = jax.random.normal(KEY, (3, 4, 4))

    def loss(images, kernel):
        made = lax.conv_general_dilated(
            images,
            kernel,
            (1,),
            "SAME",
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=2,
        )
        return (made**2).sum()

    done = check(jax.grad(loss, (0, 1)), (images, kernel), only="conv_general_dilated", count=6)
    assert done["conv_general_dilated"] > 10


def test_a_halo_longer_than_a_part_is_gathered(check):
    signal, kernel = jax.random.normal(KEY, (1, 4, 1)), jax.random.normal(KEY, (4, 1, 1))

    def function(signal, kernel):
        return lax.conv_general_dilated(
            signal, kernel, (1,), ((3, 0),), dimension_numbers=("NHC", "HIO", "NHC")
        )

    assert check(function, (signal, kernel), only="conv_general_dilated", mesh_shape=(4,))


def test_spatial_shards_exchange_only_their_edges(planned):
    images, kernel = jnp.ones((1, 16, 2)), jnp.ones((3, 2, 2))

    def function(images, kernel):
        return lax.conv_general_dilated(
            images, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )

    found = planned(function, (images, kernel), (4,), lambda s: s.operands[0].dims[1] == ("x",))
    assert [(c.kind, c.bytes) for c in found] == [("collective-permute", 8)] * 2


def test_cpus_take_batch_first_and_channels_last_and_kernels_by_window():
    def loss(image, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=dims).sum()

    shapes = jnp.zeros((2, 4, 4, 3)), jnp.zeros((3, 3, 3, 5))
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=1))(*shapes)
    forward, backward = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "conv_general_dilated"]
    assert host_orders(forward) == ((0, 1, 2, 3), (0, 1, 2, 3))
    assert host_orders(backward) == ((3, 1, 2, 0), (1, 2, 0, 3))
