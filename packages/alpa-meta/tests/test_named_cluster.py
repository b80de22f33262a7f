"""The cluster of this process, on devices that are not there."""

from types import SimpleNamespace

import jax
import pytest

import alpa_meta as alpa
from alpa_meta import named_cluster


def gpus(kind, *limits):
    """Return devices of a kind, of which jax may take so many bytes."""
    return [
        SimpleNamespace(
            platform="gpu",
            device_kind=kind,
            memory_stats=lambda limit=limit: {"bytes_limit": limit},
        )
        for limit in limits
    ]


@pytest.fixture
def devices_of(monkeypatch):
    """Return a function that makes jax's devices others."""

    def become(devices):
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(jax, "local_devices", lambda: devices)

    return become


def test_a_plan_for_the_devices_here_has_the_memory_that_jax_may_take(devices_of):
    devices_of(gpus("NVIDIA A100-SXM4-40GB", 30e9, 29e9))
    (group,) = alpa.local_cluster().host_groups
    assert (group.device.name, group.devices_per_host) == ("a100-40gb", 2)
    assert group.device.memory == 29e9


def test_devices_that_do_not_say_have_the_memory_of_the_catalogue(devices_of):
    devices_of([SimpleNamespace(platform="tpu", device_kind="TPU v4", memory_stats=lambda: None)])
    assert alpa.local_cluster() == named_cluster.named_cluster("tpu-v4:1")


def test_an_unknown_kind_is_refused_by_name(devices_of):
    devices_of(gpus("NVIDIA L40S", 30e9))
    with pytest.raises(alpa.PlanError, match="L40S.*name a cluster"):
        alpa.local_cluster()


def test_host_devices_are_as_many_as_jax_has():
    assert alpa.local_cluster().num_devices == jax.device_count()
