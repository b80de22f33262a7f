"""What every device holds while a plan runs, on the grid of all its cuts: the validity check.

`Ledger` follows a plan element-exactly without touching data: each device is a boolean array over
the cells between neighbouring cuts (tile borders and transfer borders). A device takes in only what
belongs to a tile of its own, as transports have no other memory to receive into; lower bounds rest
on that.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from alpa_interchange.reshard import ReshardingPlan, ReshardingTask, Transfer
from resharding.slices import Box, all_tiles, device_tiles, summand_groups
from resharding.traffic import gathered_pieces


class PlanError(ValueError):
    """A resharding plan does not do its task; the message names the transfer and the device."""


class Ledger:
    """The cells each device holds; transfers are applied when they finish."""

    def __init__(self, task: ReshardingTask, transfers: tuple[Transfer, ...]) -> None:
        shape = task.tensor.shape
        self.transfers = transfers
        self.source = all_tiles(task.source, shape)
        self.groups = set(map(frozenset, summand_groups(task.source)))
        self.target = device_tiles(task.target, shape, "target")
        boxes = [*self.source.values(), *self.target.values()]
        boxes += [Box(transfer.start, transfer.stop) for transfer in transfers]
        self.cuts = [
            sorted(
                {edge for box in boxes for edge in (box.start[dim], box.stop[dim])} | {0, extent}
            )
            for dim, extent in enumerate(shape)
        ]
        grid = tuple(len(cuts) - 1 for cuts in self.cuts)
        self.held: dict[int, NDArray[np.bool_]] = {}
        for device in {**self.source, **self.target}:
            self.held[device] = np.zeros(grid, dtype=bool)
        for device, box in self.source.items():
            if frozenset((device,)) in self.groups:  # else it holds a summand
                self.held[device][self.cells(box)] = True

    def cells(self, box: Box) -> tuple[slice, ...]:
        """Return the index of `box` in the grid of cells."""
        return tuple(
            slice(bisect_left(cuts, start), bisect_left(cuts, stop))
            for cuts, start, stop in zip(self.cuts, box.start, box.stop, strict=True)
        )

    def check_start(self, index: int, transfer: Transfer) -> None:
        """Refuse a transfer whose bytes are not there when it starts."""
        box = Box(transfer.start, transfer.stop)
        where = self.cells(box)
        for device in (transfer.sender, *transfer.receivers):
            if device not in self.held:
                raise PlanError(
                    f"transfer {index} ({transfer.method}) names device {device}, which is in "
                    "neither mesh"
                )
        for device in transfer.receivers:
            tiles = (self.source.get(device), self.target.get(device))
            if not any(tile is not None and tile.contains(box) for tile in tiles):
                raise PlanError(
                    f"transfer {index} ({transfer.method}) brings {box.start}..{box.stop} to "
                    f"device {device}, which has no tile with all of it: transports receive into "
                    "tiles only"
                )
        if transfer.method == "reduce":
            chain = (transfer.sender, *transfer.receivers)
            whole = frozenset(chain) in self.groups and len(set(chain)) == len(chain)
            if not whole or not all(self.source[device].contains(box) for device in chain):
                raise PlanError(
                    f"transfer {index} adds up {transfer.start}..{transfer.stop} of the devices "
                    f"{chain}, which are not all that hold its summands, each once"
                )
        elif transfer.method == "gather":
            union = np.zeros_like(self.held[transfer.sender])
            for owner, piece in gathered_pieces(self.transfers, transfer):
                if owner in transfer.receivers:
                    union[self.cells(piece)] |= self.held[owner][self.cells(piece)]
            if not union[where].all():
                raise PlanError(
                    f"transfer {index} gathers {transfer.start}..{transfer.stop}, but the pieces "
                    f"that the transfers {transfer.after} gave to its receivers are not all of it"
                )
        elif not self.held[transfer.sender][where].all():
            raise PlanError(
                f"transfer {index} ({transfer.method}) sends {transfer.start}..{transfer.stop} "
                f"from device {transfer.sender}, which does not hold all of it when it starts"
            )

    def finish(self, transfer: Transfer) -> None:
        """Give the bytes of a finished transfer to its receivers."""
        where = self.cells(Box(transfer.start, transfer.stop))
        last = slice(-1 if transfer.method == "reduce" else 0, None)
        for device in transfer.receivers[last]:
            self.held[device][where] = True

    def check_end(self) -> None:
        """Refuse a plan after which a target device lacks a part of its tile."""
        for device, box in self.target.items():
            if not self.held[device][self.cells(box)].all():
                raise PlanError(
                    f"after the plan device {device} lacks a part of its tile "
                    f"{box.start}..{box.stop}"
                )


def check_plan(plan: ReshardingPlan) -> None:
    """Refuse a plan that does not deliver every target tile when executed in order."""
    ledger = Ledger(plan.task, plan.transfers)
    for index, transfer in enumerate(plan.transfers):
        late = [k for k in transfer.after if not 0 <= k < index]
        if late:
            raise PlanError(f"transfer {index} waits for transfers {late}, which are not before it")
        ledger.check_start(index, transfer)
        ledger.finish(transfer)
    ledger.check_end()
