"""The menu kept beside a plan, and joint problems made from it again: without trace or menu
building, for the cluster it was made for or another one.

Rows are affine in samples and split by link, so one menu serves other microbatch counts, memory,
numbers of hosts and links. Devices must be the same: compute is not split further.

    links    a row costs its compute and the scaled parts of its collectives   -> on_links()
    hosts    meshes that still fit are kept; larger ones are not known         -> problem_of()
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import evolve

from alpa_interchange import (
    ClusterSpec,
    KeptMenu,
    LogicalMesh,
    ShardingSpec,
)
from alpa_interchange.kept_menu import MenuLeaf, RowSpecs
from alpa_interchange.menu import Affine, AxisPart, JointProblem, LayerRow, MeshMenu
from alpa_meta.compat import JaxprEqn, Literal
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.candidates import Outlook
from alpa_meta.inter_op.layering import Layering
from alpa_meta.inter_op.meshes import device_groups
from alpa_meta.inter_op.scope_facts import state_by_layer, state_layers
from alpa_meta.inter_op.staging import Staging
from alpa_meta.options import Options
from alpa_meta.planning.menu_search import MenuSearch, boundary_of
from alpa_meta.planning.outlooks import layers_of
from alpa_meta.planning.plan_identity import fingerprint
from alpa_meta.step.program import Program, Step
from cost_model import calibrated_model

_LOG = logging.getLogger("alpa_meta")

MAX_ROWS = 20_000  # of a menu that is kept: some 30 MB; GPT-39B on 64 devices has 4,000


def keep(
    search: MenuSearch, outlook: Outlook, step: Step, cluster: ClusterSpec, options: Options
) -> KeptMenu | None:
    """Return the menu of a search as a document; None, with a log message, where it is too large.

    `outlook`: the program that the menu's rows were made from, at any size.
    """
    menu, problem = search.menu, search.problem
    num_rows = sum(len(rows) for mesh in menu.meshes for rows in mesh.rows)
    if num_rows > MAX_ROWS:
        _LOG.warning("the menu of %d rows is not kept: at most %d are", num_rows, MAX_ROWS)
        return None
    program = outlook.program
    order: Staging | Layering = outlook.staging
    if program.left_out is not None:  # the layers of which are those of the whole batch
        program = step.program(1)
        order = layers_of(program, options, cluster)
    leaves = _leaves(program, order.eqns, order.layers, menu.class_of_layer)
    numbers: dict[ShardingSpec, int] = {}
    places = {(mesh.submesh, mesh.logical): number for number, mesh in enumerate(menu.meshes)}
    state = tuple(
        RowSpecs(
            mesh=places[submesh, logical],
            key=key,
            specs=tuple(
                tuple(numbers.setdefault(spec, len(numbers)) for spec in of_class)
                for of_class in specs
            ),
        )
        for (submesh, logical, key), specs in search.builder.state.items()
        if leaves and (submesh, logical) in places
    )
    return KeptMenu(
        fingerprint=fingerprint(step),
        cluster=cluster,
        batch_size=problem.batch_size,
        counts=problem.counts or (),
        schedules=problem.schedules,
        num_stages=problem.num_stages,
        memory=options.memory,
        menu=menu,
        crossing=tuple(map(tuple, search.crossing)),
        leaves=leaves,
        specs=tuple(numbers),
        state=state,
    )


def _leaves(
    program: Program,
    eqns: Sequence[JaxprEqn],
    layers: Sequence[int | None],
    class_of_layer: Sequence[int],
) -> tuple[MenuLeaf, ...]:
    """Return the state of a program by layer; none where layers of a class hold different state.

    Such layers (a tied weight updated with one of them) have no common specs to be kept.
    """
    carried = [
        (atom, program.jaxpr.invars[alias])
        for atom, alias in zip(program.jaxpr.outvars, program.aliases, strict=True)
        if alias is not None and not isinstance(atom, Literal)
    ]
    home = state_layers(eqns, layers, carried)
    parts = program.input_parts or (None,) * len(program.inputs)
    of_var = dict(zip(program.jaxpr.invars, zip(program.inputs, parts, strict=True), strict=True))
    found: list[MenuLeaf] = []
    shapes: dict[int, list[tuple[tuple[int, ...], str]]] = {}
    for layer, variables in sorted(state_by_layer(program, home).items()):
        own = []
        for var in variables:
            leaf, part = of_var[var]
            own.append((tuple(leaf.aval.shape), str(leaf.aval.dtype)))
            start, stop = (None, None) if part is None else (part.start, part.stop)
            found.append(
                MenuLeaf(
                    path=leaf.leaf_path,
                    shape=own[-1][0],
                    dtype=own[-1][1],
                    layer=layer,
                    start=start,
                    stop=stop,
                )
            )
        if shapes.setdefault(class_of_layer[layer], own) != own:
            return ()
    return tuple(found)


def problem_of(
    kept: KeptMenu,
    cluster: ClusterSpec | None = None,
    memory: float | None = None,
    num_microbatches: int | None = None,
) -> JointProblem:
    """Return the joint problem of a kept menu, on `cluster` with `memory` bytes per device.

    Without them: what the plan was made for. `num_microbatches` is a count to be searched, too: the
    whole batch is larger than any that rows were made from, and has no bound. Raises PlanError for
    a cluster that the menu cannot speak of.
    """
    cluster = cluster or kept.cluster
    memory = memory or kept.memory
    _check_devices(kept.cluster, cluster)
    model = calibrated_model(cluster)
    groups = device_groups(cluster, memory)
    meshes, crossing = [], []
    for mesh, sent in zip(kept.menu.meshes, kept.crossing, strict=True):
        group = cluster.host_groups[mesh.submesh.host_group]
        if mesh.submesh.num_hosts > group.num_hosts:
            continue
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
    if not all(mesh.floors for mesh in meshes):  # bounds are of all meshes or of rows only
        meshes = [evolve(mesh, floors=()) for mesh in meshes]
    menu = evolve(kept.menu, meshes=tuple(meshes))
    return JointProblem(
        menu=menu,
        batch_size=kept.batch_size,
        device_groups=groups,
        boundary=boundary_of(menu, crossing, model),
        counts=tuple(sorted({*kept.counts, num_microbatches or kept.counts[0]})),
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
