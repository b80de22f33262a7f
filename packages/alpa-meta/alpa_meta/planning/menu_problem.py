"""Joint problems made again from the menu kept beside a plan: without trace or menu building, for
the cluster it was made for or another one.

Rows are affine in samples and split by link, so one menu serves other microbatch counts, memory,
numbers of hosts and links. Devices must be the same: compute is not split further.

    links    a row costs its compute and the scaled parts of its collectives   -> on_links()
    hosts    meshes that still fit are kept; larger ones are not known         -> problem_of()
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from alpa_interchange import BoundaryLayout, ClusterSpec, KeptMenu, LogicalMesh, SubmeshSpec
from alpa_interchange.menu import (
    Affine,
    AxisPart,
    Boundary,
    BoundaryFloor,
    JointProblem,
    LayerMenu,
    LayerRow,
    MeshMenu,
)
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.meshes import device_groups
from alpa_meta.planning.boundary_seconds import prices
from cost_model import CostModel, calibrated_model

Crossing = Sequence[Sequence[BoundaryLayout]]
"""What a stage sends forward: `crossing[mesh][layout]`."""


def problem_of(
    kept: KeptMenu,
    cluster: ClusterSpec | None = None,
    memory: float | None = None,
    num_microbatches: int | None = None,
    places: Sequence[int] | None = None,
) -> JointProblem:
    """Return the joint problem of a kept menu, on `cluster` with `memory` bytes per device.

    Without them: what the plan was made for. `num_microbatches` is a count to be searched, too: the
    whole batch is larger than any that rows were made from, and has no bound. `places`: of its
    meshes, those that are of use. Raises PlanError for a cluster that the menu cannot speak of.
    """
    if not isinstance(kept, KeptMenu):
        raise PlanError(
            "a menu must be the KeptMenu of the plan (step.menu, or load_menu), which plans of one "
            "device, of num_stages=1 or of a model without equal layers that bounds alone prove "
            f"the best have not, got {kept!r}"
        )
    cluster = cluster or kept.cluster
    memory = memory or kept.memory
    _check_devices(kept.cluster, cluster)
    model = calibrated_model(cluster)
    groups = device_groups(cluster, memory)
    fitting = [
        (mesh, sent)
        for mesh, sent in zip(kept.menu.meshes, kept.crossing, strict=True)
        if mesh.submesh.num_hosts <= cluster.host_groups[mesh.submesh.host_group].num_hosts
    ]
    meshes, crossing = [], []
    for mesh, sent in fitting if places is None else [fitting[k] for k in places]:
        logical = mesh.logical
        if cluster != kept.cluster:
            logical = model.logical_mesh(mesh.submesh, logical.shape, logical.axis_names)
        meshes.append(on_links(mesh, logical))
        crossing.append(sent)
    if not meshes:
        raise PlanError(
            f"no mesh of the plan's menu fits the {cluster.num_devices} devices of "
            f"{cluster.name!r}; plan anew for it"
        )
    counts = tuple(sorted({*kept.counts, num_microbatches or kept.counts[0]}))
    # Bounds are of all meshes or of rows only, and of no microbatches above those of the menu.
    if counts != tuple(sorted(kept.counts)) or not all(mesh.floors for mesh in meshes):
        meshes = [evolve(mesh, floors=()) for mesh in meshes]
    menu = evolve(kept.menu, meshes=tuple(meshes))
    return JointProblem(
        menu=menu,
        batch_size=kept.batch_size,
        device_groups=groups,
        boundary=boundary_of(menu, crossing, model),
        boundary_floor=boundary_floor_of(menu, crossing, model),
        counts=counts,
        schedules=kept.schedules,
        num_stages=kept.num_stages,
    )


def _check_devices(known: ClusterSpec, wanted: ClusterSpec) -> None:
    """Raise PlanError unless all but links, memory and numbers of hosts are as they were."""
    if len(known.host_groups) != len(wanted.host_groups):
        raise PlanError(
            f"the plan's menu is of {len(known.host_groups)} kinds of hosts, but "
            f"{wanted.name!r} has {len(wanted.host_groups)}; plan anew for it"
        )
    for number, (one, other) in enumerate(zip(known.host_groups, wanted.host_groups, strict=True)):
        same = evolve(other.device, memory=one.device.memory) == one.device
        if not same or one.devices_per_host != other.devices_per_host:
            raise PlanError(
                f"the plan's menu has prices for hosts of {one.devices_per_host} x "
                f"{one.device.name}, but host group {number} of {wanted.name!r} has "
                f"{other.devices_per_host} x {other.device.name}; plan anew for it"
            )


def on_links(mesh: MeshMenu, logical: LogicalMesh) -> MeshMenu:
    """Return the menu of a mesh whose axes have other links: every collective runs as it did.

    Floors are left out where a link is faster: they are no bounds then.
    """
    if logical == mesh.logical:
        return mesh
    scales = [
        (
            after.latency / before.latency if before.latency else 1.0,
            before.bandwidth / after.bandwidth,
        )
        for before, after in zip(mesh.logical.axes, logical.axes, strict=True)
    ]
    faster = any(scale < 1 for pair in scales for scale in pair)
    return evolve(
        mesh,
        logical=logical,
        rows=tuple(tuple(_row(row, scales) for row in rows) for rows in mesh.rows),
        conversion={
            pair: _scaled(seconds, mesh.conversion_sent.get(pair, ()), scales)
            for pair, seconds in mesh.conversion.items()
        },
        floors=() if faster else mesh.floors,
    )


def _row(row: LayerRow, scales: Sequence[tuple[float, float]]) -> LayerRow:
    once = _scaled(Affine(row.step_seconds), row.step_sent, scales)
    return evolve(
        row,
        forward=_scaled(row.forward, row.forward_sent, scales),
        backward_input=_scaled(row.backward_input, row.backward_input_sent, scales),
        backward_weight=_scaled(row.backward_weight, row.backward_weight_sent, scales),
        step_seconds=once.fixed,
    )


def _scaled(
    seconds: Affine, sent: Sequence[AxisPart], scales: Sequence[tuple[float, float]]
) -> Affine:
    """Return seconds whose parts take (latency, bytes) `scales` of their axis times as long."""
    fixed, each = seconds.fixed, seconds.each
    for part in sent:
        for grows, scale in zip((part.latency, part.bytes), scales[part.axis], strict=True):
            fixed += grows.fixed * (scale - 1)
            each += grows.each * (scale - 1)
    return Affine(max(fixed, 0.0), max(each, 0.0))


def boundary_of(menu: LayerMenu, crossing: Crossing, model: CostModel) -> Boundary:
    """Return what crossing from mesh to mesh costs, each time on the link that it crosses.

    It is the slower of the two ways: forward the receiver wants its `layout_in`, and gradients go
    back to the sender's `layout_out`.
    """
    priced = prices(model)

    def seconds(mesh_a: int, layout_out: int, mesh_b: int, layout_in: int, link: str) -> Affine:
        out, into = crossing[mesh_a][layout_out], crossing[mesh_b][layout_in]
        return priced(menu.meshes[mesh_a], menu.meshes[mesh_b], link, out, into)

    return seconds


def boundary_floor_of(menu: LayerMenu, crossing: Crossing, model: CostModel) -> BoundaryFloor:
    """Return what crossing after a class of layers costs at least: the price of the fewest bytes
    that a row of it sends, cut evenly over all devices of both meshes.

    No layout has a smaller share on its fullest host or device, and the price grows with these.
    """
    priced = prices(model)
    sent = [
        min(
            crossing[m][row.layout_out].bytes
            for m, mesh in enumerate(menu.meshes)
            for row in mesh.rows[number]
        )
        for number in range(len(menu.meshes[0].rows))
    ]

    def even(number: int, submesh: SubmeshSpec) -> BoundaryLayout:
        return BoundaryLayout(
            bytes=sent[number],
            host_share=1 / submesh.num_hosts,
            device_share=1 / submesh.num_devices,
        )

    def seconds(number: int, mesh_a: int, mesh_b: int, link: str) -> Affine:
        source, target = menu.meshes[mesh_a], menu.meshes[mesh_b]
        out, into = even(number, source.submesh), even(number, target.submesh)
        return priced(source, target, link, out, into)

    return seconds
