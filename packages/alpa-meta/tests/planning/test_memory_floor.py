"""What the state takes at least is known before any search."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.errors import InfeasibleError
from alpa_meta.options import Options
from alpa_meta.planning.memory_floor import (
    check_arguments_fit,
    check_state_fits,
    most_parts,
)
from alpa_meta.step.program import Step
from cost_model import cluster

GIB = float(1 << 30)


def _update(weights, batch):
    gradients = jax.grad(lambda w: jnp.mean((batch @ w["matrix"] + w["bias"]) ** 2))(weights)
    return jax.tree.map(jnp.subtract, weights, gradients)


def step(*shape, dtype="float32"):
    weights = {
        "matrix": jax.ShapeDtypeStruct(shape, dtype),
        "bias": jax.ShapeDtypeStruct(shape[1:], dtype),
        "rate": jax.ShapeDtypeStruct((), dtype),
    }
    return Step(_update, (weights, jax.ShapeDtypeStruct((16, shape[0]), dtype)))


def refusal(step, **options):
    with pytest.raises(InfeasibleError) as caught:
        check_state_fits(step, cluster("h100:8"), Options(**options))
    return str(caught.value), caught.value.missing_bytes


def test_state_larger_than_all_devices_is_refused_with_what_would_hold_it():
    # 2**20 x 2**18 float32 are 1 TiB: 128 GiB on each of 8 devices of 80
    message, missing = refusal(step(1 << 20, 1 << 18))
    assert missing == pytest.approx(48 * GIB, rel=1e-4)
    assert "the state alone takes 1,099,512,676,356 bytes" in message
    assert "keep its wider floats in bfloat16 (then 68,719,542,272 bytes" in message
    assert "use at least 16 devices (then 68,719,542,272 bytes" in message


def test_a_limit_below_what_a_device_has_may_be_raised():
    message, missing = refusal(step(1 << 16, 1 << 15), memory=1e9)
    assert missing == pytest.approx((1 << 33) / 8 - 1e9, rel=1e-3)
    assert "allow the 85,899,345,920 bytes that a device has (memory)" in message


def test_state_that_fits_in_pieces_is_not_refused():
    check_state_fits(step(1 << 16, 1 << 15), cluster("h100:8"), Options(memory=1.1e9))


def test_on_one_stage_dims_that_no_mesh_divides_count_whole():
    odd = step(15, 1 << 22)  # 240 MiB of which 8 devices hold 30 each, or as many stages
    odd_dims = step(10007, 6257)  # 239 MiB, not cut at all
    limited: dict[str, Any] = {"memory": 40.0 * (1 << 20)}
    check_state_fits(odd, cluster("h100:8"), Options(**limited, num_stages=1))
    check_state_fits(odd_dims, cluster("h100:8"), Options(**limited))
    message, _ = refusal(odd_dims, **limited, num_stages=1)
    assert "use devices with at least 250,4" in message


def test_arguments_that_cannot_be_the_batch_are_refused_without_tracing():
    def never(weights, batch):
        raise AssertionError("traced")

    args = step(1 << 22, 1 << 20).args  # even an eighth of it is more than 8 devices have
    began = time.process_time()
    message, _ = refusal(Step(never, args))
    assert "no plan fits" in message and time.process_time() - began < 1


@pytest.mark.parametrize(
    ("shape", "devices", "parts"),
    [((8, 3), 8, 8), ((4, 6), 8, 8), ((2, 3), 8, 2), ((5, 7), 8, 1), ((), 8, 1), ((12, 12), 6, 6)],
)
def test_an_array_is_cut_into_divisors_of_its_dims(shape, devices, parts):
    assert most_parts(shape, devices) == parts


def test_arguments_that_may_be_the_batch_are_not_counted_before_tracing():
    # an array of 1 TiB with one number beside it, as of examples with their mean
    argument = {"x": jax.ShapeDtypeStruct((1 << 20, 1 << 18), "float32"), "mean": 0.5}
    told = Options(offload="none")
    check_arguments_fit((argument,), cluster("h100:8"), told)
    with pytest.raises(InfeasibleError, match="1,099,51"):
        check_arguments_fit(({**argument, "y": jnp.zeros(3)},), cluster("h100:8"), told)


def test_before_tracing_an_eighth_of_the_state_is_what_must_stay_near_where_hosts_have_memory():
    arguments = step(1 << 20, 1 << 18).args  # 128 GiB on each of 8 devices of 80
    here = cluster("p3dn.24xlarge:32")
    assert here.host_groups[0].host_link is not None
    check_arguments_fit(arguments, here, Options())
    with pytest.raises(InfeasibleError, match="1,099,51"):
        check_arguments_fit(arguments, here, Options(offload="none"))
