"""The cost model of one cluster: seconds of kernels, collectives and transfers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve

from alpa_interchange.cluster import ClusterSpec, DeviceSpec
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from cost_model.collective import (
    bucket_share_seconds,
    bucketed_seconds,
    collective_seconds,
    seconds_per_byte,
)
from cost_model.host import HOST_PROFILE
from cost_model.kernel import seconds
from cost_model.kernel_table import device_efficiency
from cost_model.layer_prediction import layer_seconds
from cost_model.profile import Profile, apply_profile, stored_profile
from cost_model.program import program_of
from cost_model.topology import (
    TransferLinks,
    host_group,
    leaves_host,
    logical_mesh,
    nic_bandwidth,
)

_EIGHTY_PERCENT = 1.2816  # standard deviations that hold 80 % of a normal distribution
# log spread of measured steps around the analytic model at shapes that were not measured: the scale
# of the correction to training runs on A100 (`Correction.scale`)
_STEP_ERROR = 0.14
# how far off the ratio of two steps of one model on the same devices, predicted within 20 % of each
# other, is in 80 % of pairs, out of fold: on one host (vTrain, 1,254 pairs) and on several (vTrain,
# 856 pairs). Of nanotron's 3,962 pairs 80 % are within 1.3, stalls included.
_PAIR_ERROR = 0.03
_PAIR_ERROR_HOSTS = 0.22


class CostModel:
    """Predicts times on `cluster`; a calibration `profile` replaces the catalogue's efficiencies.

    For `host` the profile of this machine is used where there is one. All methods are pure and
    cheap (microseconds), and take numpy arrays for bytes and flops.
    """

    def __init__(self, cluster: ClusterSpec, profile: Profile | None = None) -> None:
        self.cluster = cluster = cluster if profile is None else apply_profile(cluster, profile)
        self.profile = profile
        self._devices = tuple(
            _share_of_host(group.device, group.devices_per_host) if group.shared_compute
            else group.device
            for group in cluster.host_groups
        )  # fmt: skip
        self._meeting = all(group.shared_compute for group in cluster.host_groups)
        self.program = program_of(cluster)  # that runs the steps, where it is not ours
        self._log_deviation = _log_deviation(cluster, profile)
        self._efficiencies = tuple(
            self.program.efficiency()
            if self.program is not None
            else profile.efficiency
            if profile is not None and group.device.name == profile.device.name
            else device_efficiency(group.device)
            for group in cluster.host_groups
        )

    def device(self, host_group: int = 0) -> DeviceSpec:
        """Return the device of a host group as one of its busy devices sees it.

        Where the devices of a host share its processor (XLA host devices on CPU cores), each gets
        an equal share of flop/s, bandwidth and memory, since all of them work at the same time.
        """
        return self._devices[host_group]

    def compute_seconds(
        self,
        flops: Any,
        bytes: Any,
        dtype: str,
        kind: str = "matmul",
        shape: tuple[int, ...] | None = None,
        host_group: int = 0,
    ) -> Any:
        """Return the seconds of one kernel on one device.

        `flops` and `bytes` (read plus written) are those of the device, numbers or equal arrays;
        `kind` is one of `KERNEL_KINDS`; `shape` ([batch,] m, n, k) refines a matmul.
        """
        device, efficiency = self._devices[host_group], self._efficiencies[host_group]
        if self.program is None:
            return seconds(device, efficiency, flops, bytes, dtype, kind, shape)
        if shape is not None and kind == "matmul":
            flops = flops / self.program.product_share(shape, device.num_units)
        return seconds(device, efficiency, flops, bytes, dtype, kind) - device.launch_latency

    def based_on(self, host_group: int = 0) -> str:
        """Return what the seconds of a host group's kernels rest on: measured operators, a
        calibration, or the data sheet only."""
        return self._efficiencies[host_group].source

    def collective_seconds(self, kind: str, bytes: Any, axes: tuple[MeshAxis, ...]) -> Any:
        """Return the seconds of a collective over `axes`; `COLLECTIVE_BYTES` defines `bytes`."""
        if self.program is None:
            return collective_seconds(kind, bytes, axes, self._meeting)
        used = tuple(self._between_hosts(axis) for axis in axes if axis.size > 1)
        if not used:
            return 0.0 * bytes
        start, moved = (collective_seconds(kind, size, used) for size in (1.0, bytes))
        far = any(map(self._leaves_hosts, axes))
        return (np.asarray(bytes) > 0) * self.program.collective_seconds(kind, start, moved, far)

    def bucketed_seconds(
        self,
        kind: str,
        bytes: Sequence[float] | Mapping[float, int],
        axes: tuple[MeshAxis, ...],
        host_group: int = 0,
    ) -> float:
        """Return the seconds of independent collectives over `axes`, sent together in buckets: of
        `bytes` each, or of how many there are of each number of bytes."""
        if self.program is not None:
            sizes = bytes.items() if isinstance(bytes, Mapping) else ((size, 1) for size in bytes)
            whole = sum(size * count for size, count in sizes)
            alone = float(collective_seconds(kind, whole, axes))
            return alone * self.program.exposed_share(kind)
        packing = self._packing_seconds(host_group)
        return bucketed_seconds(kind, bytes, axes, packing, self._meeting)

    def bucket_share_seconds(
        self, kind: str, bytes: float, axes: tuple[MeshAxis, ...], host_group: int = 0
    ) -> float:
        """Return the seconds a tensor adds to a bucket; summed, at most what the buckets cost."""
        if self.program is not None:
            return bytes * seconds_per_byte(kind, axes) * self.program.exposed_share(kind)
        packing = self._packing_seconds(host_group)
        return bucket_share_seconds(kind, bytes, axes, packing, self._meeting)

    def _leaves_hosts(self, axis: MeshAxis) -> bool:
        groups = self.cluster.host_groups
        return axis.size > 1 and all(leaves_host(axis, group) for group in groups)

    def _between_hosts(self, axis: MeshAxis) -> MeshAxis:
        """Return an axis with the share of its bandwidth that the program's collectives inside
        layers reach between hosts."""
        assert self.program is not None
        if not self._leaves_hosts(axis):
            return axis
        return evolve(axis, bandwidth=axis.bandwidth * self.program.constants.fabric_tensor)

    def _packing_seconds(self, host_group: int) -> float:
        """Return the seconds to put a tensor into a bucket: a copy on CPUs, elsewhere an entry in
        the list of buffers of one collective."""
        device = self._devices[host_group]
        return device.launch_latency if device.platform == "cpu" else 0.0

    def transfer_seconds(
        self,
        bytes: Any,
        source: SubmeshSpec,
        target: SubmeshSpec,
        link: str | None = None,
        host_share: float | None = None,
        device_share: float | None = None,
    ) -> Any:
        """Return the seconds to move a tensor of `bytes` in all from one submesh to another.

        Every byte leaves the source once, whose hosts and devices share the sending; a target host
        takes in `host_share` of the tensor (what its devices want; broadcast inside a host is
        pipelined), a target device `device_share`. Both are those of a tensor cut over all devices
        unless given: a lower bound of what `resharding.plan` predicts (arXiv 2211.05322).
        `link` says where the submeshes lie ("host": on one host; "hosts", "groups": not);
        without it two that fit into one host together are taken as neighbours on that host.
        """
        host_share = 1 / target.num_hosts if host_share is None else host_share
        device_share = 1 / target.num_devices if device_share is None else device_share
        links = self.transfer_links(source, target, link)
        if links.hosts is None:
            share = max(1 / source.devices_per_host, device_share)
            return _move(bytes, links.latency, links.devices[0] / share)
        sent, taken = links.hosts
        slowest = max(
            1 / (source.num_hosts * sent), host_share / taken, device_share / links.devices[1]
        )
        return _move(bytes, links.latency, 1 / slowest)

    def transfer_links(
        self, source: SubmeshSpec, target: SubmeshSpec, link: str | None = None
    ) -> TransferLinks:
        """Return what a transfer between submeshes passes through; `link` as in
        `transfer_seconds`."""
        links = self._idle_links(source, target, link)
        return links if self.program is None else self.program.transfer_links(links)

    def _idle_links(
        self, source: SubmeshSpec, target: SubmeshSpec, link: str | None
    ) -> TransferLinks:
        sender = host_group(self.cluster, source)
        receiver = host_group(self.cluster, target)
        ports = (sender.intra_host.effective_bandwidth, receiver.intra_host.effective_bandwidth)
        same_host = (
            source.host_group == target.host_group
            and source.num_hosts == target.num_hosts == 1
            and source.devices_per_host + target.devices_per_host <= sender.devices_per_host
            and link in (None, "host")
        )
        if same_host:
            return TransferLinks(latency=sender.intra_host.latency, devices=ports)
        between = self.cluster.link_between(source.host_group, target.host_group)
        sent = nic_bandwidth(sender, source.devices_per_host)
        taken = nic_bandwidth(receiver, target.devices_per_host)
        if source.host_group != target.host_group:
            sent = min(sent, between.effective_bandwidth * sender.num_nics)
            taken = min(taken, between.effective_bandwidth * receiver.num_nics)
        return TransferLinks(latency=between.latency, devices=ports, hosts=(sent, taken))

    def interval(self, seconds: float) -> tuple[float, float]:
        """Return the bounds that 80 % of measurements of a step of `seconds` are expected within.

        With a calibration profile the width follows from how far its own layer samples, which are
        not fitted on, are from their prediction; else from the spread of measured training runs
        around the model, or that of matmuls where it is larger: on devices with no measured
        operators. It is stated for whole steps.
        """
        deviation = self._log_deviation
        spread = math.exp(_EIGHTY_PERCENT * deviation)
        return seconds / spread, seconds * spread

    def distinguishes(self, first: float, second: float) -> bool:
        """Return whether two steps of one model on this cluster can be told apart by their
        predicted seconds: whether they differ by more than 80 % of measured pairs were off."""
        hosts = sum(group.num_hosts for group in self.cluster.host_groups)
        known = self.profile is not None or all("operators" in e.source for e in self._efficiencies)
        error = _PAIR_ERROR if hosts == 1 and known else _PAIR_ERROR_HOSTS
        return abs(math.log(second / first)) > error

    def logical_mesh(
        self,
        submesh: SubmeshSpec,
        shape: tuple[int, ...],
        axis_names: tuple[str, ...] | None = None,
    ) -> LogicalMesh:
        """Return the mesh of `shape` over `submesh` with the link data of every axis."""
        return logical_mesh(self.cluster, submesh, shape, axis_names)


def calibrated_model(cluster: ClusterSpec) -> CostModel:
    """Return the cost model of `cluster` with the user's stored profile of its first device kind.

    Without such a profile it is the catalogue's. (`host` clusters are built from their profile, so
    `CostModel` uses it anyway.)
    """
    return CostModel(cluster, stored_profile(cluster.host_groups[0].device.name))


def _log_deviation(cluster: ClusterSpec, profile: Profile | None) -> float:
    """Return the standard deviation of log(measured / predicted) to expect of steps."""
    devices = [group.device for group in cluster.host_groups]
    if profile is None and devices[0].platform == "cpu":
        profile = stored_profile(HOST_PROFILE)
    layers = [s for s in profile.samples if s.name.startswith("layer")] if profile else []
    if profile is not None and layers:
        errors = [math.log(s.seconds / layer_seconds(profile, s)) for s in layers]
        return max(0.05, math.sqrt(sum(error**2 for error in errors) / len(errors)))
    errors = [device_efficiency(device).error("matmul") for device in devices]
    return max(_STEP_ERROR, *errors)


def _share_of_host(device: DeviceSpec, count: int) -> DeviceSpec:
    return evolve(
        device,
        memory=device.memory / count,
        memory_bandwidth=device.memory_bandwidth / count,
        peak_flops={dtype: peak / count for dtype, peak in device.peak_flops.items()},
    )


def _move(bytes: Any, latency: float, bandwidth: float) -> Any:
    if isinstance(bytes, np.ndarray):
        return np.where(bytes > 0, latency + bytes / bandwidth, 0.0)
    return latency + bytes / bandwidth if bytes > 0 else 0.0
