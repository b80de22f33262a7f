import pytest
from attrs import evolve

from alpa_interchange.mesh import SubmeshSpec
from cost_model import cluster, logical_mesh
from cost_model.topology import nic_bandwidth

H100 = cluster("h100:16")
P3 = cluster("p3.16xlarge:16")
TWO_HOSTS = SubmeshSpec(num_hosts=2, devices_per_host=8)


def test_an_axis_inside_a_host_runs_over_the_link_of_the_host():
    mesh = logical_mesh(H100, SubmeshSpec(num_hosts=1, devices_per_host=8), (2, 4), ("x", "y"))
    assert [axis.bandwidth for axis in mesh.axes] == [450e9 * 0.8] * 2


def test_an_axis_across_hosts_gets_its_share_of_the_interfaces():
    across, inside = logical_mesh(H100, TWO_HOSTS, (2, 8), ("x", "y")).axes
    # 8 groups of two devices compete for 8 interfaces of 50 GB/s
    assert across.bandwidth == pytest.approx(50e9 * 0.85)
    assert inside.bandwidth == pytest.approx(450e9 * 0.8)
    assert across.latency > inside.latency
    # one shared interface of 25 Gbit/s for all 8
    slow, _ = logical_mesh(P3, TWO_HOSTS, (2, 8), ("x", "y")).axes
    assert slow.bandwidth == pytest.approx(3.125e9 * 0.85 / 8)


def test_one_group_over_whole_hosts_has_all_interfaces():
    (only,) = logical_mesh(P3, TWO_HOSTS, (16,), ("x",)).axes
    assert only.bandwidth == pytest.approx(3.125e9 * 0.85)
    (fast,) = logical_mesh(H100, TWO_HOSTS, (16,), ("x",)).axes
    assert fast.bandwidth == pytest.approx(8 * 50e9 * 0.85)


def test_a_ring_over_whole_hosts_has_one_slow_hop_per_host():
    inside, across = 3.4e-6, 1.4e-5
    (axis,) = logical_mesh(H100, TWO_HOSTS, (16,), ("x",)).axes
    assert axis.latency == pytest.approx((7 * inside + across) / 8)


def test_a_middle_axis_that_leaves_the_host_shares_with_its_neighbours():
    # (2, 2, 4): axis 1 steps by 4 inside hosts of 8; axis 0 leaves them
    first, second, third = logical_mesh(H100, TWO_HOSTS, (2, 2, 4), ("a", "b", "c")).axes
    assert first.bandwidth < second.bandwidth == third.bandwidth


def test_with_rails_few_devices_use_few_interfaces():
    group = H100.host_groups[0]
    assert nic_bandwidth(group, 2) == pytest.approx(2 * 50e9 * 0.85)
    assert nic_bandwidth(evolve(group, rail=False), 2) == pytest.approx(8 * 50e9 * 0.85)


def test_meshes_that_do_not_match_the_submesh_are_refused():
    with pytest.raises(ValueError, match="has 8 devices, but the submesh of 2 x 8 has 16"):
        logical_mesh(H100, TWO_HOSTS, (2, 4))
    with pytest.raises(ValueError, match="needs 2 axis names"):
        logical_mesh(H100, TWO_HOSTS, (2, 8), ("x",))
    with pytest.raises(ValueError, match="does not fit"):
        logical_mesh(H100, SubmeshSpec(num_hosts=3, devices_per_host=8), (24,))
    with pytest.raises(ValueError, match="has 1 host groups"):
        logical_mesh(H100, SubmeshSpec(num_hosts=1, devices_per_host=8, host_group=1), (8,))
