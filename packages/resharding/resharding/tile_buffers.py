"""What one device holds while a plan is carried out: its source tile and its target tile."""

from __future__ import annotations

from typing import Any

from resharding.slices import Box


class TileBuffers:
    """Reads and writes slices of a tensor in the tiles of one device.

    Arrays are numpy or CuPy arrays; `source` is None on a device that holds nothing before,
    `target` on one that needs nothing. A slice that a device relays is one it needs, so it lies in
    the target.
    """

    def __init__(
        self, device: int, source: tuple[Box, Any] | None, target: tuple[Box, Any] | None
    ) -> None:
        self.device = device
        self._source, self._target = source, target

    def read(self, box: Box) -> Any:
        """Return a view of `box`, from the source tile where it lies there."""
        for tile in (self._source, self._target):
            if tile is not None and tile[0].contains(box):
                return tile[1][box.within(tile[0].start)]
        raise ValueError(
            f"device {self.device} holds no tile that contains {box.start}..{box.stop}"
        )

    def write(self, box: Box, values: Any) -> None:
        """Copy `values`, in the shape of `box` or flat in row-major order, into the target tile."""
        if self._target is None or not self._target[0].contains(box):
            raise ValueError(
                f"device {self.device} needs no tile that contains {box.start}..{box.stop}"
            )
        tile, array = self._target
        array[box.within(tile.start)] = values.reshape(box.shape)
