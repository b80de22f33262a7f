"""What of a step's state must move when it goes on by another plan: per array, from which devices
to which, the bytes over which link, and the seconds.

The old layout is the plan's; the new one is that of the rows of a re-planned pipeline, whose specs
the menu keeps (`KeptMenu.state`). Old devices are taken to be there still, so that any of
them may send what it holds. Arrays in pieces, one for each stage, are compared layer by layer along
their first dim.

    pieces     an array, or the layers of it that one mesh holds alike   -> _pieces()
    moves      each piece that is wanted, out of those there are         -> resharding.plan
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve, frozen

from alpa_interchange import (
    ClusterSpec,
    DeviceMesh,
    KeptMenu,
    ParallelPlan,
    PlacedTensor,
    ReshardingTask,
    ShardingSpec,
    TensorType,
)
from alpa_meta.errors import PlanError
from alpa_meta.planning.replanning import Replanned
from cost_model.topology import nic_bandwidth
from resharding import Network, PlanOptions, cut_slices
from resharding import plan as resharding_plan

_PIECE = re.compile(r"^(.*)\[(\d+):(\d+)\]$")
# Orders of many transfers differ by little in their seconds, and there may be thousands of arrays.
QUICK = PlanOptions(num_restarts=0, node_limit=0)


@frozen(kw_only=True)
class Move:
    """One array of the state, or the layers `start..stop` of it, that must be elsewhere.

    Bytes are the least that must cross: once to every host that lacks a part, the rest inside
    hosts. `seconds` are those of its transfers alone.
    """

    path: str
    start: int | None
    stop: int | None
    source: tuple[int, ...]  # devices, in the old cluster's numbers
    target: tuple[int, ...]  # devices, in the new cluster's numbers
    bytes_within_hosts: float
    bytes_between_hosts: float
    seconds: float


@frozen(kw_only=True)
class StateMoves:
    """All that moves: one after the other it takes `seconds`, all at once `least_seconds` or more,
    those of the busiest host's network card or device. What stays in place is left out."""

    moves: tuple[Move, ...]
    seconds: float
    least_seconds: float


@frozen
class _Piece:
    """An array on devices that hold it alike; `start..stop` of its first dim, None: all of it."""

    shape: tuple[int, ...]
    dtype: str
    spec: ShardingSpec
    axis_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    devices: tuple[int, ...]
    start: int | None = None
    stop: int | None = None


def state_moves(plan: ParallelPlan, menu: KeptMenu, replanned: Replanned) -> StateMoves:
    """Return what must move from the layout of `plan` to that of a pipeline re-planned from its
    menu. PlanError where the menu does not keep how its state lies.
    """
    devices = [stage.device_ids for stage in replanned.plan.stages]
    if not replanned.changed and devices == [s.device_ids for s in plan.stage_plan.stages]:
        return StateMoves(moves=(), seconds=0.0, least_seconds=0.0)
    places = _Places(plan.cluster, replanned.cluster)
    before, after = _old(plan), _new(menu, replanned)
    known: dict[tuple[_Piece, _Piece], tuple[float, float, float]] = {}
    cards: dict[int, float] = defaultdict(float)
    ports: dict[int, float] = defaultdict(float)
    moves = []
    for path, wanted in after.items():
        for source, target in _overlaps(before.get(path, []), wanted):
            if (source, target) not in known:
                known[source, target] = _priced(source, target, places)
            within, between, seconds = known[source, target]
            if not within and not between:
                continue
            hosts = {places.new[device][1] for device in target.devices}
            for host in hosts:
                cards[host] += between / len(hosts)
            for device in target.devices:
                ports[device] += (within + between) / len(target.devices)
            moves.append(
                Move(
                    path=path,
                    start=target.start,
                    stop=target.stop,
                    source=source.devices,
                    target=target.devices,
                    bytes_within_hosts=within,
                    bytes_between_hosts=between,
                    seconds=seconds,
                )
            )
    return StateMoves(
        moves=tuple(moves),
        seconds=math.fsum(move.seconds for move in moves),
        least_seconds=max(
            max(cards.values(), default=0.0) / places.network.nic_bandwidth,
            max(ports.values(), default=0.0) / places.network.device_bandwidth,
        ),
    )


class _Places:
    """Devices and hosts of two clusters that share hosts: (device, host) numbers of both in one
    numbering, by the number in each."""

    def __init__(self, old: ClusterSpec, new: ClusterSpec) -> None:
        groups = list(zip(old.host_groups, new.host_groups, strict=True))
        most = [max(a.num_hosts, b.num_hosts) for a, b in groups]
        first_host = [0, *itertools.accumulate(most)]
        sizes = [a.devices_per_host for a, _ in groups]
        first = [0, *itertools.accumulate(h * s for h, s in zip(most, sizes, strict=True))]

        def numbers(cluster: ClusterSpec) -> list[tuple[int, int]]:
            return [
                (first[g] + host * sizes[g] + device, first_host[g] + host)
                for g, group in enumerate(cluster.host_groups)
                for host in range(group.num_hosts)
                for device in range(group.devices_per_host)
            ]

        self.old, self.new = numbers(old), numbers(new)
        group = min(new.host_groups, key=lambda g: nic_bandwidth(g, g.devices_per_host))
        self.network = Network(
            nic_bandwidth=nic_bandwidth(group, group.devices_per_host),
            device_bandwidth=group.intra_host.effective_bandwidth,
            latency=group.inter_host.latency,
        )


def _old(plan: ParallelPlan) -> dict[str, list[_Piece]]:
    """Return the pieces of each array as a plan holds them; of equal ones on stages the first's."""
    types = {entry.path: (entry.shape, entry.dtype) for entry in plan.program.inputs}
    found: dict[str, list[_Piece]] = {}
    for sharding in plan.shardings:
        for path, spec in sharding.state_specs.items():
            match = _PIECE.match(path)
            whole, start, stop = path, None, None
            if match is not None:
                whole, start, stop = match[1], int(match[2]), int(match[3])
            known = found.setdefault(whole, [])
            if not any((piece.start, piece.stop) == (start, stop) for piece in known):
                known.append(_placed(*types[path], spec, sharding.mesh, start, stop))
    return found


def _new(menu: KeptMenu, replanned: Replanned) -> dict[str, list[_Piece]]:
    """Return the pieces of each array as the rows of a new pipeline hold them."""
    if not menu.leaves:
        raise PlanError(
            "the menu does not keep how the state lies, for equal layers of this program hold "
            "different state; plan anew to see the new layout"
        )
    meshes = [(mesh.submesh, mesh.logical.shape) for mesh in menu.menu.meshes]
    specs = {(*meshes[one.mesh], one.key): one.specs for one in menu.state}
    slot: dict[int, int] = {}
    found: dict[str, list[_Piece]] = {}
    for leaf in menu.leaves:
        place = slot[leaf.layer] = slot.get(leaf.layer, -1) + 1
        number, stage = next(
            (number, stage)
            for number, stage in enumerate(replanned.plan.stages)
            if stage.layer_start <= leaf.layer < stage.layer_stop
        )
        submesh, logical = replanned.meshes[number]
        of_class = specs[submesh, logical.shape, replanned.rows[leaf.layer].key]
        spec = menu.specs[of_class[menu.menu.class_of_layer[leaf.layer]][place]]
        mesh = DeviceMesh(submesh=submesh, logical=logical, device_ids=stage.device_ids)
        piece = _placed(leaf.shape, leaf.dtype, spec, mesh, leaf.start, leaf.stop)
        found.setdefault(leaf.path, []).append(piece)
    return found


def _placed(
    shape: Sequence[int],
    dtype: str,
    spec: ShardingSpec,
    mesh: DeviceMesh,
    start: int | None,
    stop: int | None,
) -> _Piece:
    names, sizes = mesh.logical.axis_names, mesh.logical.shape
    return _Piece(tuple(shape), dtype, spec, names, sizes, mesh.device_ids, start, stop)


def _overlaps(before: Sequence[_Piece], after: Sequence[_Piece]) -> Iterator[tuple[_Piece, _Piece]]:
    """Yield (source, target) pieces of the same elements of one array, all that are wanted."""
    if all(piece.start is None for piece in (*before, *after)):
        yield from ((before[0], target) for target in after if before)
        return
    sources = [part for piece in before for part in _by_layers(piece)]
    for piece in after:
        for target in _by_layers(piece):
            assert target.start is not None and target.stop is not None
            for source in sources:
                assert source.start is not None and source.stop is not None
                start, stop = max(source.start, target.start), min(source.stop, target.stop)
                if start < stop:
                    yield _cut(source, start, stop), _cut(target, start, stop)


def _by_layers(piece: _Piece) -> Iterator[_Piece]:
    """Yield the parts of a piece along its first dim, each with the devices that hold it."""
    first = 0 if piece.start is None else piece.start
    axes = piece.spec.dims[0]
    sizes = dict(zip(piece.axis_names, piece.mesh_shape, strict=True))
    parts = math.prod(sizes[axis] for axis in axes)
    length = -(-piece.shape[0] // parts)
    left = [axis for axis in piece.axis_names if axis not in axes]
    by_part: dict[int, list[int]] = {}
    for position, device in enumerate(piece.devices):
        at, coordinates = position, {}
        for axis in reversed(piece.axis_names):
            at, coordinates[axis] = divmod(at, sizes[axis])
        number = 0
        for axis in axes:
            number = number * sizes[axis] + coordinates[axis]
        by_part.setdefault(number, []).append(device)
    for number, devices in sorted(by_part.items()):
        start, stop = number * length, min((number + 1) * length, piece.shape[0])
        if start < stop:
            yield _Piece(
                (stop - start, *piece.shape[1:]),
                piece.dtype,
                ShardingSpec(((), *piece.spec.dims[1:])),
                tuple(left),
                tuple(sizes[axis] for axis in left),
                tuple(devices),
                first + start,
                first + stop,
            )


def _cut(piece: _Piece, start: int, stop: int) -> _Piece:
    return evolve(piece, shape=(stop - start, *piece.shape[1:]), start=start, stop=stop)


def _priced(source: _Piece, target: _Piece, places: _Places) -> tuple[float, float, float]:
    """Return the bytes within and between hosts, and the seconds."""
    task = ReshardingTask(
        tensor=TensorType(source.shape, source.dtype),
        source=_tensor(source, places.old),
        target=_tensor(target, places.new),
    )
    host_of = dict(places.old) | dict(places.new)
    within = between = 0.0
    for part in cut_slices(task):
        there = {host_of[device] for device in (*part.holders, *part.in_place)}
        hosts = {host_of[device] for device in part.receivers} - there
        between += part.num_bytes * len(hosts)
        within += part.num_bytes * (len(part.receivers) - len(hosts))
    if not within and not between:
        return 0.0, 0.0, 0.0
    return within, between, resharding_plan(task, places.network, options=QUICK).seconds


def _tensor(piece: _Piece, numbers: Sequence[tuple[int, int]]) -> PlacedTensor:
    return PlacedTensor(
        spec=piece.spec,
        axis_names=piece.axis_names,
        mesh_shape=piece.mesh_shape,
        devices=tuple(numbers[device][0] for device in piece.devices),
        hosts=tuple(numbers[device][1] for device in piece.devices),
    )


def by_kind(moves: StateMoves) -> Mapping[str, float]:
    """Return the bytes that move in all, by link."""
    return {
        "within hosts": math.fsum(move.bytes_within_hosts for move in moves.moves),
        "between hosts": math.fsum(move.bytes_between_hosts for move in moves.moves),
    }
