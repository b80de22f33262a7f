"""Carries out one device's part of a plan over a communicator; every device runs one of these.

All ranks go through the plan in the same order, so operations match without any further agreement.
Slices travel as bytes, which no element type needs to be known for (elements of less than a byte
travel a byte each, as numpy and jax hold them outside of a device):

* copy: one send, one receive;
* broadcast: in step c a relay receives chunk c from the one before it and, in the same group, sends
  chunk c - 1 to the one behind it;
* gather: a ring; in step s position k sends the piece of position k - s and receives that of
  k - s - 1;
* local: a copy on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from alpa_interchange.reshard import ReshardingPlan, Transfer
from alpa_interchange.tensor import dtype_bytes
from resharding.communicator import Communicator
from resharding.coverage import check_plan
from resharding.slices import Box, device_tiles
from resharding.tile_buffers import TileBuffers
from resharding.traffic import gathered_pieces


class RankExecutor:
    """The part of `device` in `plan`. `rank_of` gives every device its rank in the communicator.

    `arrays` is the array module the memory belongs to: numpy (default) or cupy.
    """

    def __init__(
        self,
        plan: ReshardingPlan,
        device: int,
        communicator: Communicator,
        rank_of: Mapping[int, int],
        arrays: Any = np,
    ) -> None:
        check_plan(plan)
        if rank_of[device] != communicator.rank:
            raise ValueError(
                f"device {device} has rank {rank_of[device]}, but the communicator is rank "
                f"{communicator.rank}"
            )
        self.plan, self.device = plan, device
        self._communicator, self._rank_of, self._arrays = communicator, rank_of, arrays
        shape = plan.task.tensor.shape
        self.source_tile = device_tiles(plan.task.source, shape, "source").get(device)
        self.target_tile = device_tiles(plan.task.target, shape, "target").get(device)
        self._width = math.ceil(dtype_bytes(plan.task.tensor.dtype))  # as arrays hold elements

    def run(self, shard: Any | None, dtype: Any = None) -> Any | None:
        """Return this device's target tile, or None if it needs none; `shard` is its source tile.

        `dtype` is needed on a device that holds nothing before.
        """
        if (shard is None) != (self.source_tile is None):
            given, wanted = ("no", "one") if shard is None else ("a", "none")
            raise ValueError(
                f"device {self.device} was given {given} shard, but the plan has {wanted} for it"
            )
        if (
            shard is not None
            and self.source_tile is not None
            and shard.shape != self.source_tile.shape
        ):
            raise ValueError(
                f"the shard of device {self.device} must have the shape {self.source_tile.shape} "
                f"of its tile, got {shard.shape}"
            )
        result = None
        if self.target_tile is not None:
            kind = shard.dtype if dtype is None and shard is not None else dtype
            if kind is None:
                raise ValueError(f"device {self.device} has no shard, so run() needs the dtype")
            result = self._arrays.empty(self.target_tile.shape, kind)
        buffers = TileBuffers(
            self.device,
            None if self.source_tile is None else (self.source_tile, shard),
            None if self.target_tile is None else (self.target_tile, result),
        )
        for index, transfer in enumerate(self.plan.transfers):
            if self.device == transfer.sender or self.device in transfer.receivers:
                self._execute(index, transfer, buffers, None if result is None else result.dtype)
        return result

    def _execute(self, index: int, transfer: Transfer, buffers: TileBuffers, dtype: Any) -> None:
        box = Box(transfer.start, transfer.stop)
        if transfer.method == "gather":
            self._gather(index, transfer, buffers, dtype)
            return
        if self.device == transfer.sender and transfer.method == "local":
            buffers.write(box, buffers.read(box))
            return
        chain = (transfer.sender, *transfer.receivers)
        place = chain.index(self.device)
        if place == 0:
            staged = self._pack(buffers.read(box))
        else:
            staged = self._arrays.empty(box.size * self._width, np.uint8)
        self._chain(index, transfer, chain, place, staged)
        if place:
            buffers.write(box, staged.view(dtype))

    def _chain(
        self, index: int, transfer: Transfer, chain: tuple[int, ...], place: int, staged: Any
    ) -> None:
        """Pass `staged` on in chunks: the one before fills chunk c while chunk c - 1 goes out."""
        count = transfer.num_chunks
        cuts = [len(staged) * k // count for k in range(count + 1)]
        label = f"transfer {index}, {transfer.method}"
        before = self._rank_of[chain[place - 1]] if place else None
        behind = self._rank_of[chain[place + 1]] if place + 1 < len(chain) else None
        for step in range(count + 1):
            sent = step if before is None else step - 1
            with self._communicator.group():
                if before is not None and step < count:
                    self._communicator.receive(
                        staged[cuts[step] : cuts[step + 1]], before, f"{label}, chunk {step}"
                    )
                if behind is not None and 0 <= sent < count:
                    self._communicator.send(
                        staged[cuts[sent] : cuts[sent + 1]], behind, f"{label}, chunk {sent}"
                    )

    def _gather(self, index: int, transfer: Transfer, buffers: TileBuffers, dtype: Any) -> None:
        """Pass the pieces round the ring of receivers until everyone has all of them."""
        ring = transfer.receivers
        pieces: dict[int, list[Box]] = {}
        for owner, piece in gathered_pieces(self.plan.transfers, transfer):
            pieces.setdefault(owner, []).append(piece)
        place, count = ring.index(self.device), len(ring)
        behind, before = self._rank_of[ring[(place + 1) % count]], self._rank_of[ring[place - 1]]
        packed: dict[int, Any] = {}
        if self.device in pieces:
            views = [self._pack(buffers.read(piece)) for piece in pieces[self.device]]
            packed[self.device] = self._arrays.concatenate(views) if views[1:] else views[0]
        for step in range(count - 1):
            outgoing, incoming = ring[(place - step) % count], ring[(place - step - 1) % count]
            label = f"transfer {index}, gather step {step}"
            with self._communicator.group():
                if outgoing in pieces:
                    self._communicator.send(packed[outgoing], behind, label)
                if incoming in pieces:
                    size = sum(piece.size for piece in pieces[incoming]) * self._width
                    packed[incoming] = self._arrays.empty(size, np.uint8)
                    self._communicator.receive(packed[incoming], before, label)
            at = 0
            for piece in pieces.get(incoming, ()):
                stop = at + piece.size * self._width
                buffers.write(piece, packed[incoming][at:stop].view(dtype))
                at = stop

    def _pack(self, view: Any) -> Any:
        """Return the elements of `view` as contiguous bytes in row-major order."""
        return self._arrays.ascontiguousarray(view).reshape(-1).view(np.uint8)
