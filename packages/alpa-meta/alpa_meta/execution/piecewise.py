"""Arrays that live in pieces: the layers of a stacked parameter, each on its stage's devices."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from jax.typing import DTypeLike

from alpa_meta.step.program import Program
from alpa_meta.types import DType, HostArray, PyTree
from mesh_runtime import RemoteArray, fetched


class PiecewiseArray:
    """A stacked array whose consecutive layers live apart, each piece on its stage's devices.

    A step whose stages cut a scan over layers returns the stacked leaves of its state like this,
    and takes them back. It is one leaf of a pytree, has the shape and dtype of the whole array, and
    turns into it where it is asked to: `np.asarray(x)`, `jnp.asarray(x)`, `jax.device_get(x)`,
    `step.gather(state)`. `pieces` are the jax arrays, `bounds` the layers where they meet.
    """

    def __init__(self, pieces: Sequence[PyTree], bounds: Sequence[int]) -> None:
        self.pieces = tuple(pieces)
        self.bounds = tuple(bounds)
        lengths = [piece.shape[0] for piece in self.pieces]
        if [0, *np.cumsum(lengths).tolist()] != list(self.bounds):
            raise ValueError(
                f"pieces of {lengths} layers must fill the bounds, got {list(self.bounds)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return (self.bounds[-1], *self.pieces[0].shape[1:])

    @property
    def dtype(self) -> DType:
        """The dtype of the whole array."""
        dtype: DType = self.pieces[0].dtype
        return dtype

    @property
    def ndim(self) -> int:
        """The number of dims of the whole array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return sum(piece.nbytes for piece in self.pieces)

    def layers(self, start: int, stop: int) -> PyTree:
        """Return the layers [start, stop): a piece as it is, else a new array on the host."""
        for first, last, piece in zip(self.bounds, self.bounds[1:], self.pieces, strict=False):
            if (first, last) == (start, stop):
                return piece
        return self.whole()[start:stop]

    def whole(self) -> jax.Array | HostArray:
        """Return the whole array on the host: numpy, or a key array for random keys."""
        pieces = gathered(self.pieces)
        if jnp.issubdtype(self.dtype, jax.dtypes.prng_key):
            words = jnp.concatenate([jax.random.key_data(piece) for piece in pieces])
            keys: jax.Array = jax.random.wrap_key_data(words, impl=jax.random.key_impl(pieces[0]))
            return keys
        return np.concatenate(pieces)

    def block_until_ready(self) -> PiecewiseArray:
        """Return this array once its pieces are computed."""
        for piece in self.pieces:
            piece.block_until_ready()
        return self

    def is_deleted(self) -> bool:
        """Return whether a step has overwritten a piece."""
        return any(piece.is_deleted() for piece in self.pieces)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> HostArray:
        whole = np.asarray(self.whole())
        return whole if dtype is None else whole.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.whole())

    def __getitem__(self, key: PyTree) -> PyTree:
        return self.whole()[key]

    def __len__(self) -> int:
        return self.bounds[-1]

    def __repr__(self) -> str:
        return f"PiecewiseArray({self.dtype}{list(self.shape)}, cut at {list(self.bounds[1:-1])})"


def gathered(tree: PyTree) -> PyTree:
    """Return the tree with every array whole on the host; keys stay key arrays.

    Arrays of other processes come by one request.
    """
    leaves, structure = jax.tree.flatten(tree)
    remote = iter(fetched([leaf for leaf in leaves if isinstance(leaf, RemoteArray)]))
    found = [next(remote) if isinstance(leaf, RemoteArray) else _on_host(leaf) for leaf in leaves]
    return jax.tree.unflatten(structure, found)


def _on_host(leaf: PyTree) -> PyTree:
    if isinstance(leaf, PiecewiseArray):
        return leaf.whole()
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = jax.device_get(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    return jax.device_get(leaf) if isinstance(leaf, jax.Array) else leaf


@frozen
class Piece:
    """An input of a program: all of an array, or the layers [start, stop) of it."""

    path: str
    start: int | None = None
    stop: int | None = None

    def of(self, array: PyTree) -> PyTree:
        """Return this piece of a whole or piecewise array."""
        if self.start is None or self.stop is None:
            return array.whole() if isinstance(array, PiecewiseArray) else array
        if isinstance(array, PiecewiseArray):
            return array.layers(self.start, self.stop)
        return array[self.start : self.stop]


@frozen
class StateArray:
    """An array of the user's state, by its path, and the pieces in which a program has it."""

    pieces: tuple[Piece, ...]
    path: str = ""

    def united(self, values: Sequence[PyTree]) -> PyTree:
        """Return the array made of its pieces."""
        first = self.pieces[0]
        if first.stop is None:
            return values[0]
        return PiecewiseArray(values, [0, *(piece.stop or 0 for piece in self.pieces)])


def state_arrays(program: Program, roles: Sequence[str] = ("state",)) -> tuple[StateArray, ...]:
    """Return the arrays of the state that `program` trains (or of the inputs with other roles), in
    the order of the user's leaves."""
    found: dict[str, list[Piece]] = {}
    parts = program.input_parts or [None] * len(program.inputs)
    for leaf, part in zip(program.inputs, parts, strict=True):
        if leaf.role in roles:
            start, stop = (None, None) if part is None else (part.start, part.stop)
            found.setdefault(leaf.leaf_path, []).append(Piece(leaf.path, start, stop))
    return tuple(StateArray(tuple(pieces), path) for path, pieces in found.items())


def parted(program: Program, leaves: Sequence[PyTree]) -> list[PyTree]:
    """Return the inputs of `program` for the array leaves of a call."""
    if not program.input_parts:
        return [
            Piece(leaf.path).of(value) for leaf, value in zip(program.inputs, leaves, strict=True)
        ]
    return [
        Piece(leaf.path, part.start, part.stop).of(leaves[part.leaf])
        for leaf, part in zip(program.inputs, program.input_parts, strict=True)
    ]


def copied(leaf: PyTree) -> PyTree:
    """Return a leaf that a step may overwrite: of arrays a copy, anything else as it is."""
    if isinstance(leaf, PiecewiseArray):
        return PiecewiseArray([jnp.copy(piece) for piece in leaf.pieces], leaf.bounds)
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def united(program: Program, results: Sequence[PyTree]) -> list[PyTree]:
    """Return the leaves of the user's result for the outputs of `program`, stacked ones in
    pieces; None for those of which a part is None."""
    if not program.output_parts:
        return list(results)
    leaves: dict[int, list[PyTree]] = {}
    pieces: dict[int, list[Piece]] = {}
    for part, value in zip(program.output_parts, results, strict=True):
        leaves.setdefault(part.leaf, []).append(value)
        pieces.setdefault(part.leaf, []).append(Piece("", part.start, part.stop))
    return [
        None
        if any(value is None for value in values)
        else StateArray(tuple(pieces[leaf])).united(values)
        for leaf, values in sorted(leaves.items())
    ]
