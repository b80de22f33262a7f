"""Random plans that do a task: nothing planned, so that a bound that some plan beats is found."""

from __future__ import annotations

import random

from alpa_interchange.reshard import ReshardingTask, Transfer
from resharding.slices import Box, Slice, all_tiles, cut_slices, split_box


class RandomPlan:
    """Copies, chains, gathers and messages of several slices, drawn until all tiles are whole.

    `brought[device][part]` is the transfer that brought a part of a slice there, None at first.
    """

    def __init__(self, task: ReshardingTask, seed: int) -> None:
        self.draw = random.Random(seed)
        self.transfers: list[Transfer] = []
        self.parts: list[Slice] = []
        for piece in cut_slices(task):
            count = self.draw.choice((1, 1, 1, 2, 3))
            self.parts += [piece.part(box) for box in split_box(piece.box, count)]
        self.target = all_tiles(task.target, task.tensor.shape)
        self.brought: dict[int, dict[int, int | None]] = {
            device: {} for device in (*task.source.devices, *task.target.devices)
        }
        self.lacks: dict[int, set[int]] = {}
        for number, part in enumerate(self.parts):
            for device in part.holders:
                self.brought[device][number] = None
            for device in part.receivers:
                self.lacks.setdefault(device, set()).add(number)
            for device in part.in_place:
                self._add("local", part.box, device, (device,), [])

    def made(self) -> tuple[Transfer, ...]:
        """Return the transfers."""
        moves = (self._copy, self._copy, self._chain, self._several, self._several, self._gather)
        while any(self.lacks.values()):
            self.draw.choice(moves)()
        return tuple(self.transfers)

    def _add(self, method, box, sender, receivers, parts, **more) -> None:
        brought = [self.brought[sender][part] for part in parts]
        waits = {index for index in brought if index is not None}
        self.transfers.append(
            Transfer(
                method=method,
                start=box.start,
                stop=box.stop,
                sender=sender,
                receivers=tuple(receivers),
                after=tuple(sorted(waits)),
                **more,
            )
        )
        index = len(self.transfers) - 1
        for device in receivers if method != "local" else ():
            for part in parts:
                if part in self.lacks.get(device, ()):
                    self.lacks[device].discard(part)
                    self.brought[device][part] = index

    def _part(self) -> tuple[int, list[int], list[int]]:
        """Return a part, who has it and who lacks it, in any order."""
        open_parts = sorted(set().union(*self.lacks.values()))
        part = self.draw.choice(open_parts)
        having = [device for device, parts in self.brought.items() if part in parts]
        lacking = [device for device, parts in self.lacks.items() if part in parts]
        self.draw.shuffle(lacking)
        return part, having, lacking

    def _copy(self) -> None:
        part, having, lacking = self._part()
        self._add("copy", self.parts[part].box, self.draw.choice(having), lacking[:1], [part])

    def _chain(self) -> None:
        part, having, lacking = self._part()
        count = self.draw.randint(1, len(lacking))
        chunks = self.draw.choice((1, 1, 2, 4))
        sender = self.draw.choice(having)
        method = "broadcast" if count > 1 else "copy"
        more = {"num_chunks": chunks} if count > 1 else {}
        self._add(method, self.parts[part].box, sender, lacking[:count], [part], **more)

    def _several(self) -> None:
        """Pass on all that a device has of a tile, if that is a box."""
        part, having, lacking = self._part()
        sender, receiver = self.draw.choice(having), lacking[0]
        tile = self.target[receiver]
        parts = [k for k in self.brought[sender] if tile.contains(self.parts[k].box)]
        box = self._box(parts)
        if box is not None and tile.contains(box):
            self._add("copy", box, sender, [receiver], parts)

    def _gather(self) -> None:
        """Give all devices of a tile what copies have brought to one of them each, if a box."""
        part, _, lacking = self._part()
        tile = self.target[lacking[0]]
        ring = [device for device, other in self.target.items() if other == tile]
        owned: dict[int, int] = {}  # part -> transfer
        for device in ring:
            for number, index in self.brought[device].items():
                if index is not None and self.transfers[index].method == "copy":
                    transfer = self.transfers[index]
                    if Box(transfer.start, transfer.stop) == self.parts[number].box:
                        owned.setdefault(number, index)
        box = self._box(list(owned))
        if len(ring) < 2 or box is None:
            return
        self.draw.shuffle(ring)
        after = tuple(owned.values())
        self.transfers.append(
            Transfer(
                method="gather",
                start=box.start,
                stop=box.stop,
                sender=ring[0],
                receivers=tuple(ring),
                after=tuple(sorted(after)),
            )
        )
        for device in ring:
            for number in owned:
                if number in self.lacks.get(device, ()):
                    self.lacks[device].discard(number)
                    self.brought[device][number] = len(self.transfers) - 1

    def _box(self, parts: list[int]) -> Box | None:
        """Return the box that parts make up; None if they do not."""
        if not parts:
            return None
        boxes = [self.parts[k].box for k in parts]
        whole = Box(
            tuple(map(min, zip(*(box.start for box in boxes), strict=True))),
            tuple(map(max, zip(*(box.stop for box in boxes), strict=True))),
        )
        return whole if whole.size == sum(box.size for box in boxes) else None
