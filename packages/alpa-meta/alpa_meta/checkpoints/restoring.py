"""`restore`: a checkpoint into any layout, by the processes that will hold it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from attrs import field, frozen
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from alpa_meta.checkpoints.leaves import is_array, key_words, named_leaves, nested, pieces_of
from alpa_meta.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    check_files,
    read_manifest,
    settings_of,
)
from alpa_meta.checkpoints.npz_files import is_npz, read_npz
from alpa_meta.checkpoints.orbax_files import require_orbax
from alpa_meta.checkpoints.places import checkpoint_paths, step_of
from alpa_meta.checkpoints.saved_leaves import SCALARS, VALUES, SavedLeaf, keys_shape
from alpa_meta.checkpoints.saving import free_bytes
from alpa_meta.execution.exported_function import key_impl
from alpa_meta.execution.piecewise import PiecewiseArray
from alpa_meta.execution.state import Unborn
from alpa_meta.step.pure_call import without_objects
from alpa_meta.types import HostArray, PyTree
from mesh_runtime import ArrayReader, Part, RemoteArray, StoredArray, StoreError, restore_remote

if TYPE_CHECKING:
    from mesh_runtime.remote_array import Owner


class Arrays(Protocol):
    """Where the arrays of a checkpoint are read from."""

    def open(self, arrays: Iterable[StoredArray]) -> None:
        """Prepare to read arrays."""
        ...

    def part(self, part: Part) -> HostArray:
        """Return a part of an array on the host."""
        ...

    def sharded(self, parts: Sequence[tuple[Part, Sharding]], host_bytes: int) -> list[jax.Array]:
        """Return parts of arrays laid out by shardings."""
        ...


@frozen(kw_only=True)
class Checkpoint:
    """A checkpoint whose files were found whole. `passed_over` says which newer ones were not."""

    path: Path
    step: int
    settings: Mapping[str, object]
    leaves: Mapping[str, SavedLeaf] = field(repr=False)
    note: str = ""
    passed_over: tuple[str, ...] = ()
    arrays: Arrays = field(repr=False)

    def restore(self, like: PyTree = None, *, host_bytes: int | None = None) -> PyTree:
        """Return the state as a pytree like `like`, each array where and as that of `like` is.

        Arrays of `like` may be shapes: those with a sharding are laid out by it, others come as
        numpy arrays. Leaves of it that are no arrays or Python values stay what they are. Without
        `like`, the state is nested dicts and lists of numpy arrays, without what has no leaves.
        """
        if like is None:
            return self._nested()
        if isinstance(like, Unborn):
            like = like.shapes()
        self.check(like)
        named, structure = named_leaves(like)
        made = _Made(self, host_bytes or free_bytes() // 4)
        try:
            self.arrays.open(leaf.stored for leaf in self.leaves.values() if leaf.dtype)
            values = [made.leaf(path, leaf) for path, leaf in named]
            made.read()
            values = [value() for value in values]
        except StoreError as error:
            raise CheckpointError(str(error)) from None
        _, rebuild = without_objects(like)
        return rebuild(structure.unflatten(values))

    def _nested(self) -> PyTree:
        try:
            self.arrays.open(leaf.stored for leaf in self.leaves.values() if leaf.dtype)
            return nested((leaf.keys, self._leaf(leaf)) for leaf in self.leaves.values())
        except StoreError as error:
            raise CheckpointError(str(error)) from None

    def _leaf(self, leaf: SavedLeaf) -> PyTree:
        if leaf.value is not None:
            return _value(leaf)
        array = self.arrays.part(_whole(leaf))
        return _keys(array, leaf.impl, None) if leaf.kind == "key" else array

    def check(self, like: PyTree) -> None:
        """Raise CheckpointError for a program whose state is another, leaf by leaf."""
        named, _ = named_leaves(like.shapes() if isinstance(like, Unborn) else like)
        wanted = {path: leaf for path, leaf in named if is_array(leaf) or type(leaf) in _TYPES}
        differences = [f"{path} is missing" for path in wanted if path not in self.leaves]
        extra = [path for path in self.leaves if path not in wanted]
        differences += [f"{path} is not in the program" for path in extra]
        for path in wanted.keys() & self.leaves.keys():
            here, there = _described(self.leaves[path]), _described_like(wanted[path])
            if not _fits(self.leaves[path], wanted[path]):
                differences.append(f"{path} is {here} in the checkpoint and {there} in the program")
        if not differences:
            return
        shown = "\n  ".join(sorted(differences)[:8])
        more = f"\n  and {len(differences) - 8} more" if len(differences) > 8 else ""
        raise CheckpointError(
            f"{self.path}: belongs to another program; {len(differences)} leaves differ:\n"
            f"  {shown}{more}"
        )


def restore(
    path: str | os.PathLike[str],
    like: PyTree = None,
    *,
    step: int | None = None,
    host_bytes: int | None = None,
) -> PyTree:
    """Return the state of the newest sound checkpoint in the folder `path`, or of a step's.

    See `Checkpoint.restore`. Damaged checkpoints are passed over with a warning.
    """
    checkpoint = read_checkpoint(path, step=step)
    for one in (*checkpoint.passed_over, checkpoint.note):
        if one:
            warnings.warn(one, stacklevel=2)
    return checkpoint.restore(like, host_bytes=host_bytes)


def read_checkpoint(path: str | os.PathLike[str], *, step: int | None = None) -> Checkpoint:
    """Return the newest sound checkpoint in a folder, that of a step, or the one that `path` is.

    Every file is read and compared with its SHA-256; arrays are not held in memory.
    """
    require_orbax("alpa_meta.restore")
    folder = Path(path).absolute()
    if (folder / MANIFEST).exists() or is_npz(folder):
        return _read(folder)
    places = checkpoint_paths(folder)
    if step is not None:
        places = [place for place in places if step_of(place) == step]
    if not places:
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{path}: holds {what} (a directory named step-<number>)")
    if jax.process_count() > 1:
        return _agreed(places)
    return _newest(places)


def read_settings(folder: Path) -> Mapping[str, object]:
    """Return the settings of the newest checkpoint that has readable ones, none if there is
    none."""
    for place in reversed(checkpoint_paths(folder)):
        try:
            return _settings(place)
        except CheckpointError:
            continue
    return {}


def _newest(places: Sequence[Path]) -> Checkpoint:
    """Return the last of the checkpoints that is sound."""
    refusals: list[str] = []
    for place in reversed(places):
        try:
            found = _read(place)
        except CheckpointError as error:
            refusals.append(str(error))
            continue
        notes = tuple(f"{refusal}; going back to {place.name}" for refusal in refusals)
        return Checkpoint(
            path=found.path,
            step=found.step,
            settings=found.settings,
            leaves=found.leaves,
            note=found.note,
            passed_over=notes,
            arrays=found.arrays,
        )
    older = f"; none of the {len(refusals) - 1} older ones is sound" if len(refusals) > 1 else ""
    raise CheckpointError(f"{refusals[0]}{older}")


def _agreed(places: Sequence[Path]) -> Checkpoint:
    """Return the checkpoint that the first process chose, on each process of a group."""
    chosen, refusal = -1, ""
    if jax.process_index() == 0:
        try:
            newest = _newest(places)
            chosen = places.index(newest.path)
        except CheckpointError as error:
            refusal = str(error)
    chosen = int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
    if chosen < 0:
        raise CheckpointError(refusal or f"{places[-1].parent}: holds no sound checkpoint")
    return newest if jax.process_index() == 0 else _read(places[chosen], check=False)


def _read(place: Path, check: bool = True) -> Checkpoint:
    if is_npz(place):
        step, settings, arrays = read_npz(place)
        return Checkpoint(
            path=place,
            step=step,
            settings=settings,
            leaves=arrays.leaves(),
            arrays=arrays,
            note=f"{place}: is of an older alpa-meta; the next checkpoint has the present form",
        )
    manifest = read_manifest(place)
    if check:
        check_files(place, manifest)
    return Checkpoint(
        path=place,
        step=manifest.step,
        settings=settings_of(manifest, place),
        leaves={leaf.path: leaf for leaf in manifest.leaves},
        arrays=ArrayReader(place),
    )


def _settings(place: Path) -> Mapping[str, object]:
    if is_npz(place):
        return read_npz(place, with_arrays=False)[1]
    return settings_of(read_manifest(place), place)


# ---------------------------------------------------------------------- leaf by leaf

_TYPES = set(VALUES.values())


class _Made:
    """The leaves of a state to be: first all are asked for, then all are read at once."""

    def __init__(self, checkpoint: Checkpoint, host_bytes: int) -> None:
        self._checkpoint, self._host_bytes = checkpoint, host_bytes
        self._local: list[tuple[Part, Sharding]] = []
        self._remote: dict[Owner, list[tuple[Part, RemoteArray]]] = {}
        self._made: list[jax.Array] = []
        self._made_remote: dict[Owner, list[RemoteArray]] = {}

    def leaf(self, path: str, like: PyTree) -> Callable[[], PyTree]:
        """Ask for a leaf; return what gives it after `read`."""
        if not is_array(like) and type(like) not in _TYPES:
            return lambda: like
        saved = self._checkpoint.leaves[path]
        if not is_array(like):
            return lambda: self._number(saved, type(like))
        if not saved.dtype:
            return lambda: jnp.asarray(_value(saved), like.dtype)
        pieces = [self._piece(saved, start, piece) for start, piece in pieces_of(like)]
        if isinstance(like, PiecewiseArray):
            return lambda: PiecewiseArray([piece() for piece in pieces], like.bounds)
        return pieces[0]

    def read(self) -> None:
        """Read all that was asked for."""
        self._made = self._checkpoint.arrays.sharded(self._local, self._host_bytes)
        for owner, parts in self._remote.items():
            self._made_remote[owner] = restore_remote(
                self._checkpoint.path, parts, self._host_bytes
            )

    def _number(self, saved: SavedLeaf, kind: type) -> PyTree:
        if saved.value is not None:
            return _as_kind(_value(saved), kind)
        return _as_kind(self._checkpoint.arrays.part(_whole(saved)).item(), kind)

    def _piece(self, saved: SavedLeaf, start: int, like: PyTree) -> Callable[[], PyTree]:
        impl = key_impl(like)
        words = saved.shape[len(like.shape) :] if impl else ()
        shape = (*like.shape, *words)
        origin = (start, *(0 for _ in shape[1:])) if shape else ()
        part = Part(saved.stored, origin, shape)
        sharding = getattr(like, "sharding", None)
        if isinstance(like, RemoteArray) and isinstance(self._checkpoint.arrays, ArrayReader):
            return self._remote_piece(part, like, impl)
        if impl is not None:
            return lambda: _keys(self._checkpoint.arrays.part(part), impl, sharding)
        if saved.kind in SCALARS:  # a step returned an array for the number it was given
            return lambda: _placed(self._checkpoint.arrays.part(part).astype(like.dtype), sharding)
        if not isinstance(sharding, Sharding) or isinstance(like, RemoteArray):
            return lambda: self._checkpoint.arrays.part(part)
        self._local.append((part, sharding))
        number = len(self._local) - 1
        return lambda: self._made[number]

    def _remote_piece(
        self, part: Part, like: RemoteArray, impl: str | None
    ) -> Callable[[], PyTree]:
        words, owner = key_words(like), like.owner
        if not isinstance(words, RemoteArray):  # a small result that came to the driver
            return lambda: self._checkpoint.arrays.part(part)
        asked = self._remote.setdefault(owner, [])
        asked.append((part, words))
        number = len(asked) - 1

        def found() -> RemoteArray:
            array = self._made_remote[owner][number]
            return array if impl is None else array.as_keys(impl)

        return found


def _value(saved: SavedLeaf) -> PyTree:
    assert saved.value is not None
    return saved.value == "True" if saved.kind == "bool" else VALUES[saved.kind](saved.value)


def _as_kind(number: PyTree, kind: type) -> PyTree:
    """Return a number as a Python type, or as it is where that would be another number: a step may
    have made 0.5 of the 1 that it was given."""
    try:
        made = kind(number)
    except (TypeError, ValueError, OverflowError):
        return number
    return made if made == number else number


def _whole(leaf: SavedLeaf) -> Part:
    return Part(leaf.stored, (0,) * len(leaf.shape), leaf.shape)


def _keys(words: HostArray, impl: str, sharding: object) -> PyTree:
    return _placed(jax.random.wrap_key_data(jnp.asarray(words), impl=impl), sharding)


def _placed(array: PyTree, sharding: object) -> PyTree:
    return array if not isinstance(sharding, Sharding) else jax.device_put(array, sharding)


def _fits(saved: SavedLeaf, like: PyTree) -> bool:
    """Return whether a saved leaf may become one like another: numbers and arrays of no dims are
    one thing, as steps return arrays for the numbers that they are given."""
    if not is_array(like):
        if type(like) is str or saved.kind == "str":
            return saved.kind == type(like).__name__
        return saved.kind in VALUES or (saved.kind == "array" and saved.shape == ())
    if saved.kind in VALUES:
        return saved.kind != "str" and tuple(like.shape) == () and key_impl(like) is None
    impl, shape = key_impl(like), tuple(like.shape)
    if impl is not None:
        same = saved.impl in (impl, "") and keys_shape(saved.shape, saved.dtype, impl) == shape
        return bool(same)
    return saved.kind == "array" and saved.shape == shape and saved.dtype == str(like.dtype)


def _described(saved: SavedLeaf) -> str:
    if saved.kind == "key":
        return f"random keys {saved.impl}{list(saved.shape[:-1])}"
    return f"{saved.dtype}{list(saved.shape)}" if saved.kind == "array" else f"a {saved.kind}"


def _described_like(like: PyTree) -> str:
    if not is_array(like):
        return f"a {type(like).__name__}"
    impl = key_impl(like)
    what = str(like.dtype) if impl is None else f"random keys {impl}"
    return f"{what}{list(like.shape)}"
