"""Submeshes and logical meshes of a cluster."""

import pytest

from alpa_meta.inter_op.meshes import logical_meshes, memory_per_device, submeshes, whole_cluster
from cost_model import CostModel, cluster


def test_submeshes_are_parts_of_a_host_then_hosts():
    assert [mesh.num_devices for mesh in submeshes(cluster("host:8"))] == [1, 2, 4, 8]
    two_hosts = submeshes(cluster("h100:16"))
    assert [(mesh.num_hosts, mesh.devices_per_host) for mesh in two_hosts] == [
        (1, 1),
        (1, 2),
        (1, 4),
        (1, 8),
        (2, 8),
    ]


def shapes(name, devices, axes, **more):
    known = cluster(name)
    (submesh,) = [mesh for mesh in submeshes(known) if mesh.num_devices == devices]
    return [mesh.shape for mesh in logical_meshes(CostModel(known), submesh, axes, **more)]


@pytest.mark.parametrize(
    ("devices", "axes", "expected"),
    [
        (1, 2, [(1,)]),
        (4, 1, [(4,)]),
        (4, 2, [(4,), (2, 2)]),
        (8, 2, [(8,), (2, 4)]),
        (8, 3, [(8,), (2, 4), (2, 2, 2)]),
    ],
)
def test_equal_links_need_one_order_of_axes_only(devices, axes, expected):
    assert shapes("host:8", devices, axes) == expected


def test_where_axes_are_named_their_order_matters():
    assert shapes("host:8", 8, 2, ordered=True) == [(8,), (2, 4), (4, 2)]


def test_axes_over_hosts_and_inside_them_differ():
    assert (2, 8) in shapes("h100:16", 16, 2)
    model = CostModel(cluster("h100:16"))
    whole = whole_cluster(cluster("h100:16"))
    assert whole is not None
    mesh = next(m for m in logical_meshes(model, whole, 2) if m.shape == (2, 8))
    assert mesh.axes[0].bandwidth < mesh.axes[1].bandwidth


def test_host_devices_share_the_memory_of_their_host():
    one, eight = memory_per_device(cluster("host:1")), memory_per_device(cluster("host:8"))
    assert one == pytest.approx(8 * eight)
    assert memory_per_device(cluster("h100:16")) > 60e9


def test_of_many_large_hosts_one_axis_at_most_reaches_from_host_to_host():
    assert shapes("h100:8x8", 64, 2) == [(64,), (8, 8), (16, 4), (32, 2)]
    assert (2, 32) in shapes("h100:8x8", 64, 2, ordered=True)
    assert (2, 16) in shapes("h100:8x8", 32, 2)
