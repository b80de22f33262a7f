import pytest

from alpa_interchange.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec
from resharding import HostLinks, Network
from resharding.network import Links, network_of


def test_devices_share_the_cards_of_their_host_in_consecutive_groups():
    host_of = {0: 0, 1: 0, 2: 0, 3: 0, 100: 1}
    links = Links(Network(num_nics=2, issue="none"), host_of)
    assert links.cards_out[0] == links.cards_out[1] != links.cards_out[2] == links.cards_out[3]
    assert links.num_cards == {0: 2, 1: 1}  # one device reaches one card
    assert links.host_rate == {0: 2.5e9, 1: 1.25e9}
    blocking = Links(Network(num_nics=2, issue="host"), host_of)
    assert blocking.host_rate == {0: 1.25e9, 1: 1.25e9}  # one operation at a time, by one card
    assert links.hop_rate(0, 1) == 25e9 and links.hop_rate(0, 100) == 1.25e9


def test_a_hop_runs_at_the_slower_of_two_unequal_hosts():
    network = Network(hosts=(HostLinks(host=1, nic_bandwidth=1e8, device_bandwidth=1e10),))
    links = Links(network, {0: 0, 100: 1, 101: 1, 200: 2})
    assert links.hop_rate(0, 200) == 1.25e9
    assert links.hop_rate(0, 100) == links.hop_rate(100, 0) == 1e8
    assert links.hop_rate(100, 101) == 1e10
    with pytest.raises(ValueError, match="must name each host once"):
        Network(hosts=(HostLinks(host=1), HostLinks(host=1)))


def test_the_network_of_a_cluster_knows_its_groups():
    def group(num_hosts, card, nics):
        return HostGroup(
            device=DeviceSpec(
                name="gpu", memory=1e9, memory_bandwidth=1e12, peak_flops={"float32": 1e12}
            ),
            num_hosts=num_hosts,
            devices_per_host=4,
            intra_host=LinkSpec(name="nvlink", bandwidth=1e11, latency=1e-6),
            inter_host=LinkSpec(name="card", bandwidth=card, latency=5e-6, efficiency=0.8),
            num_nics=nics,
        )

    cluster = ClusterSpec(name="mixed", host_groups=(group(2, 1e10, 1), group(1, 2e10, 2)))
    network = network_of(cluster, "none")
    assert (network.nic_bandwidth, network.num_nics, network.latency) == (8e9, 1, 5e-6)
    assert network.device_bandwidth == 1e11 and network.issue == "none"
    assert network.hosts == (
        HostLinks(host=2, nic_bandwidth=1.6e10, num_nics=2, device_bandwidth=1e11),
    )


def test_chunks_of_a_chain_follow_the_fill_or_the_latency():
    rates = [1e9, 1e9, 1e9, 1e9]
    assert Network().num_chunks(1e9, [1e9]) == 1
    assert Network(chunk_bytes=1e6).num_chunks(1e9, rates) == 1000
    assert Network().num_chunks(1e5, rates) in (
        750,
        751,
    )  # three more hops fill in 0.4 % of the time
    # D/b = 1 s, fill 3 s, latency 10 ms: sqrt(300), and 1 + 3/17 + 0.17 is less than for 18
    assert Network(latency=1e-2).num_chunks(1e9, rates) == 17
    assert Network(least_chunk_bytes=1e9).num_chunks(1e9, rates) == 1
