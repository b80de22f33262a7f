"""Plans on Ray: where meshes stand, and what is refused before any process starts."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attrs import evolve

import alpa_meta as alpa
import stage_dp
from alpa_interchange import DeviceMesh, LogicalMesh, MeshAxis, SubmeshSpec
from alpa_meta.execution import ray_meshes
from alpa_meta.execution.ray_meshes import RayMeshes, RayPool, ray_mesh
from cost_model import cluster as named_cluster
from mesh_runtime import RayOptions

CLUSTER = named_cluster("h100:2x8")


def mesh(*devices, hosts=1):
    return DeviceMesh(
        submesh=SubmeshSpec(num_hosts=hosts, devices_per_host=len(devices) // hosts),
        logical=LogicalMesh(
            axes=(MeshAxis(name="x", size=len(devices), bandwidth=1e9, latency=1e-6),)
        ),
        device_ids=devices,
    )


def test_a_mesh_asks_for_the_gpus_it_has_on_each_of_its_hosts():
    options = RayOptions(cpus_per_actor=4)
    part = ray_mesh(CLUSTER, mesh(8, 9, 10, 11), "gpu", options)
    assert (part.hosts, part.num_hosts, part.num_gpus, part.num_cpus) == ((1,), 1, 4, 4)
    both = ray_mesh(CLUSTER, mesh(*range(16), hosts=2), "gpu", options)
    assert (both.hosts, both.num_hosts, both.num_gpus) == ((0, 1), 2, 8)
    assert ray_mesh(CLUSTER, mesh(0, 1), "cpu", options).num_gpus == 0


def test_devices_that_are_not_in_the_order_of_their_hosts_are_refused():
    with pytest.raises(alpa.PlanError, match=r"has devices of hosts \[0, 1, 0, 1\] in that order"):
        ray_mesh(CLUSTER, mesh(0, 8, 1, 9, hosts=2), "gpu", RayOptions())
    with pytest.raises(alpa.PlanError, match="host by host, as many of each"):
        ray_mesh(CLUSTER, mesh(0, 1, 2, 8), "gpu", RayOptions())


def step(weights, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
    return weights - gradient, loss


SHAPES = jax.ShapeDtypeStruct((8, 8), np.float32), jax.ShapeDtypeStruct((8, 8), np.float32)


def test_the_cluster_must_be_named():
    with pytest.raises(alpa.PlanError, match="name the cluster they make"):
        alpa.parallelize(step, runtime="ray").plan_for(*SHAPES)


def test_devices_that_workers_cannot_have_are_refused():
    plan = alpa.parallelize(step, cluster="host:4").plan_for(*SHAPES)
    (group,) = plan.cluster.host_groups
    groups = (evolve(group, device=evolve(group.device, platform="tpu")),)
    plan = evolve(plan, cluster=evolve(plan.cluster, host_groups=groups))
    with pytest.raises(alpa.PlanError, match=r"runs on CPUs and GPUs, but cluster .* has 'tpu'"):
        RayMeshes(plan, RayPool(RayOptions()), "none")


class Workers:
    """Stands for the workers of a mesh on two hosts, of which one may take less memory."""

    closed = ""
    meshes, workers = (None,), tuple(SimpleNamespace(mesh=0, host=host) for host in range(2))

    def __init__(self, *limits):
        self.limits = limits

    def work(self, method, calls):
        assert method == "memory"
        return [(worker, (self.limits[worker.host], "NVIDIA H100")) for worker, _ in calls]


@pytest.mark.parametrize(("less", "warnings"), [(1, 1), (0, 0), (None, 0)])
def test_a_plan_is_held_to_the_memory_that_jax_may_take_on_the_workers(
    monkeypatch, recwarn, less, warnings
):
    plan = alpa.parallelize(step, cluster="host:4", num_stages=1).plan_for(*SHAPES)
    (needed,) = stage_dp.device_bytes(plan.stage_plan)
    limits = (None, None) if less is None else (2 * needed, needed - less)
    pool = RayPool(RayOptions())
    monkeypatch.setattr(pool, "workers", lambda meshes: Workers(*limits))
    monkeypatch.setattr(ray_meshes, "RayRuntime", lambda *_, **__: None)
    RayMeshes(plan, pool, "none")
    said = [str(one.message) for one in recwarn if one.category is RuntimeWarning]
    assert len(said) == warnings
    assert all("stage 0" in one and "of NVIDIA H100" in one for one in said)
