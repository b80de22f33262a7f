"""Batches that the hosts of the meshes read themselves, each the rows that its devices need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import jax
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from mesh_runtime.layout import HostTiles
from mesh_runtime.pieces import Box

ReadRows: TypeAlias = Callable[[int, int, int], Any]
"""(step, start, stop) -> the rows start..stop of the batch of a step: a pytree of arrays."""
Rows: TypeAlias = tuple[int, int]


class HostBatches:
    """The batches of a run, read by the hosts that need them: `batches[step]` stands for one.

    `read(step, start, stop)` returns the pytree of a step's batch with rows start..stop of each
    leaf, `like` says its structure and the shapes of whole leaves, which all have as many rows. A
    leaf without dims is read by a call for no rows. `read` must give the same rows whenever it is
    asked for them; on Ray every worker has a copy of it, and reads ahead for the step that follows.
    """

    def __init__(self, read: ReadRows, like: Any) -> None:
        self.read = read
        leaves: list[Any]
        self.structure: Any
        leaves, self.structure = jax.tree.flatten(like)
        self.shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in leaves]
        counts = {one.shape[0] for one in self.shapes if one.shape}
        if len(counts) != 1:
            raise ValueError(
                "the leaves of a batch that hosts read must have equally many rows, got "
                f"{sorted(counts)}"
            )
        self.num_rows = counts.pop()
        self._reader = RowReader(read, self.shapes)

    def __getitem__(self, step: int) -> Any:
        """Return the batch of a step: nothing is read yet."""
        if step < 0:
            raise IndexError(f"steps count from 0, got {step}")
        whole = (0, self.num_rows)
        return self.structure.unflatten(
            HostLeaf(self, step, k, whole) for k in range(len(self.shapes))
        )

    def rows(self, step: int, leaf: int, rows: Rows) -> NDArray[Any]:
        """Return rows of a leaf, read here."""
        whole = (0, self.num_rows) if self.shapes[leaf].shape else (0, 0)
        found = self._reader.whole(step, whole)[leaf]
        return found[slice(*rows)] if found.shape else found


@frozen(eq=False)
class HostLeaf:
    """Rows of a leaf of a batch, as hosts read them; an array of this process where it is asked
    for."""

    source: HostBatches
    step: int
    leaf: int
    rows: Rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, of these rows."""
        whole: tuple[int, ...] = self.source.shapes[self.leaf].shape
        return (self.rows[1] - self.rows[0], *whole[1:]) if whole else ()

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.source.shapes[self.leaf].dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def __getitem__(self, rows: slice) -> HostLeaf:
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise IndexError(f"rows of a batch that hosts read are a range, got {rows}")
        first = self.rows[0]
        return HostLeaf(self.source, self.step, self.leaf, (first + start, first + stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.source.rows(self.step, self.leaf, self.rows), dtype)


@frozen
class HostRead:
    """Rows of a leaf that a host reads: of the batch `source` (a number that workers know); the
    rows of `count` microbatches, if it is not 0."""

    source: int
    step: int
    leaf: int
    rows: Rows
    count: int = 0

    def parts(self, name: str) -> dict[str, HostRead]:
        """Return what is read for each microbatch, by name; of what is no whole, itself."""
        if not self.count:
            return {name: self}
        (start, stop), part = self.rows, (self.rows[1] - self.rows[0]) // self.count
        bounds = [(at, at + part) for at in range(start, stop, part)]
        return {
            f"{name}@{k}": HostRead(self.source, self.step, self.leaf, rows)
            for k, rows in enumerate(bounds)
        }


class RowReader:
    """Reads the batches of one `HostBatches` in one process, the next one while a step runs."""

    def __init__(self, read: ReadRows, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
        self._read, self._shapes = read, tuple(shapes)
        self._ahead: dict[tuple[int, Rows], Future[list[NDArray[Any]]]] = {}

    def whole(self, step: int, rows: Rows) -> list[NDArray[Any]]:
        """Return rows of all leaves of a batch."""
        return self._ranges(step, [rows])[rows]

    def shape(self, read: HostRead) -> tuple[int, ...]:
        """Return the shape of what is read."""
        whole: tuple[int, ...] = self._shapes[read.leaf].shape
        return (read.rows[1] - read.rows[0], *whole[1:]) if whole else ()

    def shares(
        self, reads: Mapping[str, HostRead], boxes: Mapping[str, Iterable[Box]]
    ) -> dict[str, HostTiles]:
        """Return boxes of what is read, by name; those of a step are read together."""
        found: dict[str, HostTiles] = {}
        steps = {each.step for each in reads.values()}
        for step in sorted(steps):
            named = {name: each for name, each in reads.items() if each.step == step}
            spans = [
                _rows_of(each, box) for name, each in named.items() for box in set(boxes[name])
            ]
            held = self._ranges(step, _joined(spans))
            for name, each in named.items():
                tiles = [(box, _cut(held, each, box)) for box in set(boxes[name])]
                found[name] = HostTiles(self.shape(each), tiles)
        return found

    def _ranges(self, step: int, ranges: Sequence[Rows]) -> dict[Rows, list[NDArray[Any]]]:
        """Return ranges of rows of a step's batch; begin to read those of the next one."""
        self._ahead = {key: one for key, one in self._ahead.items() if key[0] in (step, step + 1)}
        found = {rows: self._range(step, rows).result() for rows in ranges}
        for rows in ranges:
            self._range(step + 1, rows)
        return found

    def _range(self, step: int, rows: Rows) -> Future[list[NDArray[Any]]]:
        if (step, rows) not in self._ahead:
            self._ahead[step, rows] = self._begin(step, rows)
        return self._ahead[step, rows]

    def _begin(self, step: int, rows: Rows) -> Future[list[NDArray[Any]]]:
        future: Future[list[NDArray[Any]]] = Future()

        def run() -> None:
            try:
                future.set_result(self._checked(step, rows))
            except BaseException as error:  # noqa: B036 - raised where the rows are asked for
                future.set_exception(error)

        threading.Thread(target=run, name=f"rows {rows} of step {step}", daemon=True).start()
        return future

    def _checked(self, step: int, rows: Rows) -> list[NDArray[Any]]:
        """Return rows as `read` gives them; ValueError says which leaf is not as it was said."""
        made = [np.asarray(one) for one in jax.tree.leaves(self._read(step, *rows))]
        if len(made) != len(self._shapes):
            raise ValueError(
                f"read({step}, {rows[0]}, {rows[1]}) gave {len(made)} leaves, not the "
                f"{len(self._shapes)} that a batch has"
            )
        for k, (one, like) in enumerate(zip(made, self._shapes, strict=True)):
            wanted = (rows[1] - rows[0], *like.shape[1:]) if like.shape else ()
            dtype = jax.dtypes.canonicalize_dtype(one.dtype)
            if one.shape != wanted or dtype != jax.dtypes.canonicalize_dtype(like.dtype):
                raise ValueError(
                    f"read({step}, {rows[0]}, {rows[1]}) gave {dtype}{list(one.shape)} for leaf "
                    f"{k}, which must be {like.dtype}{list(wanted)}"
                )
            made[k] = one.astype(dtype, copy=False)
        return made


def _rows_of(read: HostRead, box: Box) -> Rows:
    if not box:
        return (0, 0)
    return read.rows[0] + box[0][0], read.rows[0] + box[0][1]


def _joined(ranges: Iterable[Rows]) -> list[Rows]:
    """Return ranges with those that touch or overlap made one."""
    found: list[Rows] = []
    for start, stop in sorted(set(ranges)):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _cut(held: Mapping[Rows, Sequence[NDArray[Any]]], read: HostRead, box: Box) -> NDArray[Any]:
    start, stop = _rows_of(read, box)
    rows = next(rows for rows in held if rows[0] <= start and stop <= rows[1])
    leaf = held[rows][read.leaf]
    if not box:
        return leaf
    others = (slice(*bounds) for bounds in box[1:])
    return leaf[(slice(start - rows[0], stop - rows[0]), *others)]
