"""The leaves of a state as a checkpoint has them: arrays, random keys as words, Python values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from attrs import evolve, frozen
from jax.tree_util import PyTreeDef

from alpa_meta.checkpoints.manifest import CheckpointError
from alpa_meta.checkpoints.orbax_files import Marker, NumberMarker
from alpa_meta.checkpoints.saved_leaves import SCALARS, VALUES, SavedLeaf
from alpa_meta.execution.exported_function import key_impl
from alpa_meta.execution.piecewise import PiecewiseArray
from alpa_meta.execution.state import Unborn
from alpa_meta.step.pure_call import without_objects
from alpa_meta.types import PyTree
from mesh_runtime import Part, RemoteArray, StoredArray, chunk_shape, tile_boxes

_INDEX = re.compile(r"\[(\d{1,9})\]")
_GAP = 1 << 16  # how many members of a list may have had no leaves


@frozen(eq=False)
class HeldLeaf:
    """A leaf to be saved, and the arrays that make it up, each with where it begins."""

    leaf: SavedLeaf
    pieces: tuple[tuple[tuple[int, ...], PyTree], ...] = ()

    def named(self, name: str) -> HeldLeaf:
        """Return this leaf under the name that its array has in the files."""
        return evolve(self, leaf=evolve(self.leaf, name=name))

    def parts(self) -> list[tuple[Part, PyTree]]:
        """Return the parts of the stored array and the arrays that hold them."""
        leaf = self.leaf
        if not self.pieces:
            return []
        tiles = [
            tuple((a + start, b + start) for start, (a, b) in zip(origin, box, strict=True))
            for origin, array in self.pieces
            for box in _boxes(array)
        ]
        chunks = chunk_shape(leaf.shape, jnp.dtype(leaf.dtype).itemsize, tiles)
        stored = StoredArray(leaf.name, leaf.shape, leaf.dtype, chunks)
        return [(Part(stored, origin, tuple(array.shape)), array) for origin, array in self.pieces]


def nested(leaves: Iterable[tuple[tuple[str, ...], PyTree]]) -> PyTree:
    """Return leaves as nested dicts and lists by their keys; in a list, None where nothing is."""
    children: dict[str, list[tuple[tuple[str, ...], PyTree]]] = {}
    for keys, leaf in leaves:
        if not keys:
            return leaf
        children.setdefault(keys[0], []).append((keys[1:], leaf))
    places = [_INDEX.fullmatch(key) for key in children]
    if not children or not all(places):
        return {key: nested(members) for key, members in children.items()}
    by_index = {int(place[1]): nested(children[place[0]]) for place in places if place}
    return [by_index.get(k) for k in range(min(max(by_index), len(by_index) + _GAP) + 1)]


def _flat(state: PyTree) -> tuple[list[tuple[tuple[object, ...], PyTree]], PyTreeDef]:
    """Return (key path, leaf) of a state, of nnx objects their variables', and its structure."""
    found: tuple[list[tuple[tuple[object, ...], PyTree]], PyTreeDef]
    found = jax.tree_util.tree_flatten_with_path(without_objects(state)[0])
    return found


def _keys(path: Iterable[object]) -> tuple[str, ...]:
    """Return the keys of a path in a pytree as text."""
    found = []
    for key in path:
        index = getattr(key, "idx", None)
        name = getattr(key, "key", getattr(key, "name", key))
        found.append(str(name) if index is None else f"[{index}]")
    return tuple(found)


def named_leaves(state: PyTree) -> tuple[list[tuple[str, PyTree]], PyTreeDef]:
    """Return (path, leaf) of a state, of nnx objects their variables', and its structure."""
    flat, structure = _flat(state)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat], structure


def held_leaves(state: PyTree) -> tuple[dict[int, HeldLeaf], PyTreeDef]:
    """Return the leaves to save, by number, and the state with markers in their places.

    Leaves that are neither arrays nor Python values (functions) are the program's own: None.
    """
    flat, structure = _flat(state)
    held, marked = {}, []
    for number, (path, leaf) in enumerate(flat):
        found = _held(jax.tree_util.keystr(path), leaf)
        marker: PyTree = None
        if found is not None:
            held[number] = evolve(found, leaf=evolve(found.leaf, keys=_keys(path)))
            marker = Marker(number)
            if found.leaf.kind in SCALARS and found.pieces:
                marker = NumberMarker(number)
            elif not found.pieces:
                marker = found.leaf.value
        marked.append(marker)
    return held, structure.unflatten(marked)


def key_words(array: PyTree) -> PyTree:
    """Return random keys as their words, other arrays as they are."""
    if isinstance(array, RemoteArray):
        value = array.buffer.value
        return RemoteArray(array.buffer) if value is None else value
    return array if key_impl(array) is None else jax.random.key_data(array)


def pieces_of(leaf: PyTree) -> Iterator[tuple[int, PyTree]]:
    """Yield the arrays that make up an array, with the layers that they begin at."""
    if isinstance(leaf, PiecewiseArray):
        yield from zip(leaf.bounds, leaf.pieces, strict=False)
    else:
        yield 0, leaf


def is_array(leaf: PyTree) -> bool:
    """Return whether a leaf is an array, not a Python number."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _held(path: str, leaf: PyTree) -> HeldLeaf | None:
    if isinstance(leaf, (Unborn, jax.ShapeDtypeStruct, jax.core.Tracer)):
        raise CheckpointError(
            f"{path or 'the state'}: is a {type(leaf).__name__}, which has no values to save; save "
            "the state that a step or init(make, ..., batch=...) returned"
        )
    if is_array(leaf):
        return _held_array(path, leaf)
    kind = type(leaf).__name__
    if VALUES.get(kind) is not type(leaf):
        return None
    found = SavedLeaf(path=path, kind=kind, value=str(leaf))
    if kind not in SCALARS or (isinstance(leaf, int) and not -(1 << 63) <= leaf < 1 << 63):
        return HeldLeaf(found)
    array = np.asarray(leaf)
    return HeldLeaf(evolve(found, dtype=str(array.dtype)), (((), array),))


def _held_array(path: str, leaf: PyTree) -> HeldLeaf:
    if isinstance(leaf, (jax.Array, RemoteArray, PiecewiseArray)) and leaf.is_deleted():
        raise CheckpointError(
            f"{path}: was given away to a step, which overwrote it; save the state that it returned"
        )
    impl = key_impl(leaf)
    pieces = [(start, key_words(piece)) for start, piece in pieces_of(leaf)]
    first = pieces[0][1]
    if not isinstance(first, (jax.Array, RemoteArray)):
        first = np.asarray(first)
        pieces = [(0, first)]
    kind = getattr(first.dtype, "kind", "?")
    if kind not in "biufc" and not (kind == "V" and jnp.issubdtype(first.dtype, jnp.number)):
        raise CheckpointError(f"{path}: arrays of dtype {first.dtype} cannot be saved")
    inner = first.shape[1:]
    shape = (pieces[-1][0] + pieces[-1][1].shape[0], *inner) if first.ndim else ()
    found = SavedLeaf(
        path=path,
        kind="array" if impl is None else "key",
        dtype=str(first.dtype),
        shape=shape,
        impl=impl or "",
    )
    return HeldLeaf(
        found,
        tuple(((start, *(0 for _ in inner)) if first.ndim else (), one) for start, one in pieces),
    )


def _boxes(array: PyTree) -> Sequence[tuple[tuple[int, int], ...]]:
    """Return the tiles of an array, wherever they are."""
    if isinstance(array, RemoteArray):
        return array.buffer.layout.boxes(array.shape)
    if isinstance(array, jax.Array):
        return tile_boxes(array)
    return [tuple((0, extent) for extent in array.shape)]
