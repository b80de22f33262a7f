"""What a runtime on other processes is handed: a planner of transfers and what carries them out.

The package `resharding` has both, `resharding.plan` and `resharding.HostTransport`; this module
says what is asked of them, and makes the tasks for the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from alpa_interchange.reshard import PlacedTensor, ReshardingPlan, ReshardingTask
from alpa_interchange.schedule import PipelineSchedule
from alpa_interchange.tensor import ShardingSpec, TensorType
from mesh_runtime.layout import Layout
from mesh_runtime.loaded_plan import LoadedPlan
from mesh_runtime.order import value_name
from mesh_runtime.worker_mesh import WorkerMesh, worker_name

Planner: TypeAlias = Callable[[ReshardingTask], ReshardingPlan]
Moves: TypeAlias = dict[tuple[str, int, int], ReshardingPlan]
"""The plan of every value that goes from one mesh to another: (value, from, to)."""


Awaited: TypeAlias = tuple[tuple[str, ...], float]
"""The workers that a transfer waits for, and for how many seconds nothing of it has moved; none
where it waits for none, or the transport does not know."""


class Sending(Protocol):
    """A send under way."""

    def taken(self, timeout: float) -> None:
        """Wait until the arrays may be given away."""
        ...

    def result(self, timeout: float) -> None:
        """Wait until all peers have what they need."""
        ...

    def awaited(self) -> Awaited:
        """Return the workers that have yet to take what is there, from any thread."""
        ...


class Receiving(Protocol):
    """A receive under way."""

    def result(self, timeout: float) -> Mapping[int, NDArray[np.uint8]]:
        """Wait for the tile of every target device here, as bytes."""
        ...

    def awaited(self) -> Awaited:
        """Return the workers that have yet to send, where somebody waits for it, from any
        thread."""
        ...

    def cancel(self) -> None:
        """Give up."""
        ...


class Channel(Protocol):
    """What a worker sends and receives by, once it knows the others."""

    def send(
        self,
        key: str,
        plan: ReshardingPlan,
        tiles: Callable[[], Mapping[int, Any]],
        program: str = "",
    ) -> Sending:
        """Post the sends of this worker's devices; `tiles()` gives their arrays by device."""
        ...

    def receive(self, key: str, plan: ReshardingPlan, program: str = "") -> Receiving:
        """Post the receives of this worker's devices."""
        ...

    def close(self) -> None:
        """Give up all that is under way."""
        ...


class Transport(Channel, Protocol):
    """One worker's end of what carries values between meshes."""

    @property
    def address(self) -> Any:
        """What the others need to reach it: plain data."""
        ...

    def connect(self, peers: Mapping[str, Any], owner_of: Mapping[int, str]) -> None:
        """Learn the addresses of the others, and which worker owns each device."""
        ...


class TransportMaker(Protocol):
    """Makes a worker's end; importable in its process. `link` replaces connections."""

    def __call__(
        self, name: str, token: bytes, host: str, *, link: Any = None, checksum: bool = False
    ) -> Transport:
        """Return the end called `name`; all who know `token` may meet."""
        ...


def device_number(meshes: Sequence[WorkerMesh], mesh: int, position: int) -> int:
    """Return what plans call a device of a mesh: devices are numbered through the meshes."""
    return sum(each.num_devices for each in meshes[:mesh]) + position


def device_numbers(meshes: Sequence[WorkerMesh], mesh: int) -> tuple[int, ...]:
    """Return what plans call the devices of a mesh."""
    first = device_number(meshes, mesh, 0)
    return tuple(range(first, first + meshes[mesh].num_devices))


def device_owners(meshes: Sequence[WorkerMesh]) -> dict[int, str]:
    """Return the worker that owns each device."""
    return {
        device_number(meshes, index, position): worker_name(index, mesh.host_of(position))
        for index, mesh in enumerate(meshes)
        for position in range(mesh.num_devices)
    }


def plan_moves(
    loaded: LoadedPlan,
    meshes: Sequence[WorkerMesh],
    hosts: Sequence[Sequence[int]],
    planner: Planner,
) -> Moves:
    """Return the plan of every value sent; `hosts[mesh][k]` is the host of its worker k.

    Arrays of random keys have none, as they cannot be sent.
    """

    def placed(mesh: int, layout: Layout, rank: int) -> PlacedTensor:
        grid = meshes[mesh]
        return PlacedTensor(
            spec=_sharding_spec(layout, rank),
            axis_names=layout.axis_names,
            mesh_shape=layout.shape,
            devices=device_numbers(meshes, mesh),
            hosts=tuple(hosts[mesh][grid.host_of(k)] for k in range(grid.num_devices)),
        )

    moves: Moves = {}
    for value, source, target in _sent(loaded.schedule):
        found = loaded.type_of(source, value)
        if (value, source, target) in moves or found.dtype.startswith("key<"):
            continue
        rank = len(found.shape)
        moves[value, source, target] = planner(
            ReshardingTask(
                tensor=TensorType(found.shape, found.dtype),
                source=placed(source, found.layout, rank),
                target=placed(target, loaded.layouts[target][value], rank),
            )
        )
    return moves


def _sent(schedule: PipelineSchedule) -> Iterator[tuple[str, int, int]]:
    for mesh, program in enumerate(schedule.programs):
        for each in program:
            if each.kind == "send" and each.peer is not None:
                for name in each.inputs:
                    yield value_name(name), mesh, each.peer


def _sharding_spec(layout: Layout, rank: int) -> ShardingSpec:
    dims = [
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in layout.spec
    ]
    return ShardingSpec((*dims, *[()] * (rank - len(dims))))
