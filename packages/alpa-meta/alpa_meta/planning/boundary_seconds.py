"""Seconds to cross from one stage to the next: what the resharding planner predicts for its values.

The planner is asked once for every pair of layouts, with the microbatches that the menu was made
from; of its seconds the latency is fixed, the rest grows with the samples. Where it is not asked, a
crossing costs what its bytes take at least on the links (`CostModel.transfer_seconds`), which is
never above the planner's seconds: for bounds over all layouts, between meshes of very many devices,
and for menus that were kept without the values of their boundaries.
"""

from __future__ import annotations

from collections.abc import Callable

from alpa_interchange import BoundaryLayout, ShardingSpec
from alpa_interchange.menu import Affine, MeshMenu
from alpa_interchange.reshard import PlacedTensor, ReshardingTask
from cost_model import CostModel
from resharding import HostLinks, Network, PlanOptions
from resharding import plan as resharding_plan

Prices = Callable[[MeshMenu, MeshMenu, str, BoundaryLayout, BoundaryLayout], Affine]

# Pairs of a sending and a receiving device up to which the planner is asked: 4 hosts of 8 to 4 take
# it 25 ms on average, 16 to 16 a second, and a search asks for some hundred pairs of layouts.
_MOST_PAIRS = 1024
_QUICK = PlanOptions(num_restarts=0, node_limit=0)  # orders of hosts that block: here none does


def prices(model: CostModel) -> Prices:
    """Return the seconds one way from a layout on one mesh to a layout on another: the slower of
    forward and, from there to here, back."""
    known: dict[tuple[object, ...], Affine] = {}

    def priced(
        source: MeshMenu, target: MeshMenu, link: str, out: BoundaryLayout, into: BoundaryLayout
    ) -> Affine:
        key = (source.submesh, source.logical, target.submesh, target.logical, link, out, into)
        if key not in known:
            ask = predicted if _predictable(source, target, out, into) else least
            forward = ask(model, source, target, link, out, into, out.bytes)
            back = ask(model, target, source, link, into, out, out.bytes)
            known[key] = Affine(max(forward.fixed, back.fixed), max(forward.each, back.each))
        return known[key]

    return priced


def least(
    model: CostModel,
    source: MeshMenu,
    target: MeshMenu,
    link: str,
    out: BoundaryLayout,
    into: BoundaryLayout,
    size: float,
) -> Affine:
    """Return what `size` bytes per sample take at least into a layout."""
    shares = (into.host_share, into.device_share) if into.bytes else (None, None)
    one, two = (
        float(model.transfer_seconds(each, source.submesh, target.submesh, link, *shares))
        for each in (size, 2 * size)
    )
    return Affine(max(2 * one - two, 0.0), max(two - one, 0.0))


def predicted(
    model: CostModel,
    source: MeshMenu,
    target: MeshMenu,
    link: str,
    out: BoundaryLayout,
    into: BoundaryLayout,
    size: float,
) -> Affine:
    """Return what the planner predicts for the values of two layouts, one after the other."""
    network, first_host = _network(model, source, target, link)
    seconds = total = 0.0
    for there, here in zip(out.values, into.values, strict=True):
        task = ReshardingTask(
            tensor=there.tensor,
            source=_placed(source, there.spec, 0, 0),
            target=_placed(target, here.spec, source.submesh.num_devices, first_host),
        )
        made = resharding_plan(task, network, options=_QUICK)
        seconds += max(0.0, made.seconds - network.latency)
        total += there.tensor.bytes
    return Affine(network.latency, seconds * size / max(total, 1.0))


def _predictable(
    source: MeshMenu, target: MeshMenu, out: BoundaryLayout, into: BoundaryLayout
) -> bool:
    """Return whether the planner can be asked for two layouts of the same values, soon enough."""
    pairs = source.submesh.num_devices * target.submesh.num_devices
    same = [one.tensor for one in out.values] == [one.tensor for one in into.values]
    return bool(out.values) and same and pairs <= _MOST_PAIRS


def _network(
    model: CostModel, source: MeshMenu, target: MeshMenu, link: str
) -> tuple[Network, int]:
    """Return what lies between two meshes, and the number of the target's first host."""
    links = model.transfer_links(source.submesh, target.submesh, link)
    if links.hosts is None:
        network = Network(device_bandwidth=links.devices[0], latency=links.latency, issue="none")
        return network, 0
    sent, taken = (
        (rate / count, count)
        for rate, count in zip(
            links.hosts, (_num_cards(model, mesh) for mesh in (source, target)), strict=True
        )
    )
    first = source.submesh.num_hosts
    hosts = (
        HostLinks(
            host=first + k,
            nic_bandwidth=taken[0],
            num_nics=taken[1],
            device_bandwidth=links.devices[1],
        )
        for k in range(target.submesh.num_hosts)
    )
    network = Network(
        nic_bandwidth=sent[0],
        num_nics=sent[1],
        device_bandwidth=links.devices[0],
        hosts=tuple(hosts),
        latency=links.latency,
        issue="none",
    )
    return network, first


def _num_cards(model: CostModel, mesh: MeshMenu) -> int:
    """Return how many cards of a host its devices of a mesh use, each a card of its own."""
    num_nics = model.cluster.host_groups[mesh.submesh.host_group].num_nics
    return min(num_nics, mesh.submesh.devices_per_host)


def _placed(mesh: MeshMenu, spec: ShardingSpec, first: int, first_host: int) -> PlacedTensor:
    devices = range(mesh.submesh.num_devices)
    return PlacedTensor(
        spec=ShardingSpec(spec.dims),
        axis_names=mesh.logical.axis_names,
        mesh_shape=mesh.logical.shape,
        devices=tuple(first + device for device in devices),
        hosts=tuple(first_host + device // mesh.submesh.devices_per_host for device in devices),
    )
