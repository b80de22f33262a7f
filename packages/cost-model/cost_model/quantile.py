"""A cluster as slow as it is with a given probability, for plans that are safe rather than quick.

With q the quantile, z that of the normal distribution and e the log error of a kind of cost,

    peak flop/s / exp(z e_matmul)     memory bandwidth / exp(z e_elementwise)
    link bandwidth / exp(z e_link)    link latency x exp(z e_link)              -> at_quantile()

Errors of one kind of cost go together in a step, and those of kernels and links are taken to:
quantiles of terms that rise and fall together add up, so that a step planned on such a cluster
takes at most the predicted time with probability q or more. Costs that are better known weigh less
than at their mean: plans avoid traffic over a network that nothing was measured on.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from attrs import evolve

from alpa_interchange.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec
from cost_model.kernel_table import device_efficiency
from cost_model.link_table import link_table
from cost_model.profile import (
    apply_profile,
    marked_program,
    marked_quantile,
    stored_profile,
)

# log errors of links. Fitted all-reduces: the largest error of the fits, 3 %, and more elsewhere
_MEASURED_LINK = 0.05
# assumed: like the fitted ones but for the generation
_LIKE_MEASURED = 0.2
# the shares of the network that programs reached, 0.38, 0.39, 0.29 and 0.98 (`fabric_bandwidth` in
# data/step_*.json of nanotron, Sailor, Megatron Bridge and FSDP), scatter by 0.53 in the logarithm
_NETWORK = 0.5


def at_quantile(cluster: ClusterSpec, quantile: float) -> ClusterSpec:
    """Return `cluster` with what its kernels and links reach with probability `quantile`.

    0.5 is the cluster itself, 0.9 one that is quicker nine times out of ten. Memory is unchanged.
    The user's stored profile of a device counts before.
    """
    if not 0.01 <= quantile <= 0.99:
        raise ValueError(f"quantile must be from 0.01 to 0.99, got {quantile!r}")
    if marked_quantile(cluster.name):
        raise ValueError(f"cluster {cluster.name!r} is at a quantile already")
    if marked_program(cluster.name):
        raise ValueError(
            f"cluster {cluster.name!r} states the program that runs on it; put the quantile before "
            "it, as in h100:16@90%+nanotron"
        )
    profile = stored_profile(cluster.host_groups[0].device.name)
    if profile is not None:
        cluster = apply_profile(cluster, profile)
    z = NormalDist().inv_cdf(quantile)
    between = cluster.inter_group
    return evolve(
        cluster,
        name=f"{cluster.name}@{100 * quantile:g}%",
        host_groups=tuple(_slower_hosts(group, z) for group in cluster.host_groups),
        inter_group=None if between is None else _slower_link(between, _NETWORK, z),
        group_links=tuple(
            evolve(pair, link=_slower_link(pair.link, _NETWORK, z)) for pair in cluster.group_links
        ),
    )


def _slower_hosts(group: HostGroup, z: float) -> HostGroup:
    inside, host_link = group.intra_host, group.host_link
    fitted = any(fit.link == inside.name for fit in link_table().fits)
    return evolve(
        group,
        device=_slower_device(group.device, z),
        intra_host=_slower_link(inside, _MEASURED_LINK if fitted else _LIKE_MEASURED, z),
        inter_host=_slower_link(group.inter_host, _NETWORK, z),
        host_link=None if host_link is None else _slower_link(host_link, _LIKE_MEASURED, z),
    )


def _slower_device(device: DeviceSpec, z: float) -> DeviceSpec:
    efficiency = device_efficiency(device)
    compute = math.exp(z * efficiency.error("matmul"))
    memory = math.exp(z * efficiency.error("elementwise"))
    return evolve(
        device,
        peak_flops={dtype: peak / compute for dtype, peak in device.peak_flops.items()},
        memory_bandwidth=device.memory_bandwidth / memory,
    )


def _slower_link(link: LinkSpec, error: float, z: float) -> LinkSpec:
    factor = math.exp(z * error)
    return evolve(link, bandwidth=link.bandwidth / factor, latency=link.latency * factor)
