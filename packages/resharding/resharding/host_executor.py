"""Carries out a plan in one address space: numpy shards in, numpy shards out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_interchange.reshard import ReshardingPlan
from resharding.coverage import check_plan
from resharding.slices import Box, all_tiles, device_tiles, summand_groups
from resharding.tile_buffers import TileBuffers
from resharding.traffic import gathered_pieces

Allocate = Callable[[tuple[int, ...], Any], NDArray[Any]]


class HostExecutor:
    """Executes every transfer of `plan` in order; the plan is checked once, when this is made."""

    def __init__(self, plan: ReshardingPlan) -> None:
        check_plan(plan)
        self.plan = plan
        shape = plan.task.tensor.shape
        self.source_tiles = all_tiles(plan.task.source, shape)
        self.target_tiles = device_tiles(plan.task.target, shape, "target")

    def run(
        self, shards: Mapping[int, NDArray[Any]], allocate: Allocate = np.empty
    ) -> dict[int, NDArray[Any]]:
        """Return the tile of every target device, given that of every source device.

        `allocate(shape, dtype)` makes the result arrays. Bytes are copied; only summands of an
        unreduced source are added, in the order of the chains.
        """
        dtype = self._check(shards)
        grouped = max(map(len, summand_groups(self.plan.task.source))) > 1
        held = {device: np.empty_like(one) if grouped else one for device, one in shards.items()}
        results = {device: allocate(box.shape, dtype) for device, box in self.target_tiles.items()}
        buffers = {
            device: TileBuffers(
                device,
                (self.source_tiles[device], held[device]) if device in held else None,
                (self.target_tiles[device], results[device]) if device in results else None,
            )
            for device in {**self.source_tiles, **self.target_tiles}
        }
        for transfer in self.plan.transfers:
            if transfer.method == "gather":
                for owner, piece in gathered_pieces(self.plan.transfers, transfer):
                    values = buffers[owner].read(piece)
                    for receiver in transfer.receivers:
                        if receiver != owner:
                            buffers[receiver].write(piece, values)
                continue
            box = Box(transfer.start, transfer.stop)
            if transfer.method == "reduce":
                chain = (transfer.sender, *transfer.receivers)
                parts = [shards[one][box.within(self.source_tiles[one].start)] for one in chain]
                last = box.within(self.source_tiles[chain[-1]].start)
                held[chain[-1]][last] = functools.reduce(np.add, parts)
                continue
            values = buffers[transfer.sender].read(box)
            for receiver in transfer.receivers:
                buffers[receiver].write(box, values)
        return results

    def _check(self, shards: Mapping[int, NDArray[Any]]) -> np.dtype[Any]:
        if set(shards) != set(self.source_tiles):
            raise ValueError(
                "shards must be given for exactly the source devices "
                f"{sorted(self.source_tiles)}, got {sorted(shards)}"
            )
        for device, box in self.source_tiles.items():
            if shards[device].shape != box.shape:
                raise ValueError(
                    f"the shard of device {device} must have the shape {box.shape} of its tile, "
                    f"got {shards[device].shape}"
                )
        dtypes = {shard.dtype for shard in shards.values()}
        if len(dtypes) != 1:
            raise ValueError(f"all shards must have one dtype, got {sorted(map(str, dtypes))}")
        return dtypes.pop()
