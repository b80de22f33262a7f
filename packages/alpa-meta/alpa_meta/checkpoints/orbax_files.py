"""What orbax-checkpoint writes of a checkpoint: the state's structure, and the merged database.

The arrays themselves are written by the processes that hold them (`mesh_runtime.ArrayWriter`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
from attrs import frozen

from alpa_meta.checkpoints.manifest import CheckpointError
from alpa_meta.extras import require
from alpa_meta.types import Private

_ONLY_WRITES = "checkpoints are read by alpa_meta.restore, not by the handlers that write them"


@frozen(eq=False)
class Marker:
    """Stands in a state for its leaf number `number`: an array, or a Python number."""

    number: int


class NumberMarker(Marker):
    """A leaf that orbax gives back as a Python number."""


def require_orbax(what: str) -> None:
    """Raise MissingExtraError unless checkpoints can be written and read."""
    require(what, "orbax.checkpoint", "tensorstore")


class OrbaxFiles:
    """The files of orbax in one folder."""

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp
        from etils import epath

        self._folder = epath.Path(folder)
        self._names: dict[int, str] = {}
        self._args: Private = ocp.args.PyTreeSave
        handlers: Private = ocp.type_handlers
        named = _handlers(handlers, self._names)
        registry = handlers.create_type_handler_registry(
            (NumberMarker, named["scalar"]),
            (Marker, named["np.ndarray"]),
            (str, handlers.StringHandler()),
            (jax.Array, handlers.ArrayHandler()),  # of which there are none: orbax asks for it
        )
        self._handler: Private = ocp.PyTreeCheckpointHandler(
            type_handler_registry=registry, use_ocdbt=True
        )

    def write_structure(self, marked: Private) -> dict[int, str]:
        """Write the structure of a state of markers and strings; return the names of arrays."""
        try:
            self._handler.save(self._folder, args=self._args(marked))
        except ValueError as error:
            raise CheckpointError(f"orbax-checkpoint refuses this state: {error}") from None
        _check_names(sorted(self._names.values()))
        return self._names

    def merge(self) -> None:
        """Make one database of those that the processes wrote."""
        self._handler.finalize(self._folder)


def _handlers(type_handlers: Private, names: dict[int, str]) -> dict[str, Private]:
    """Return, by what they call it, handlers of markers that note the names which orbax chose."""

    class Named(type_handlers.TypeHandler):  # type: ignore[misc]
        """Only writes: what orbax would read is read by `mesh_runtime.ArrayReader`."""

        def __init__(self, kind: str) -> None:
            self._kind = kind

        def typestr(self) -> str:
            return self._kind

        async def metadata(self, infos: Private) -> Private:
            raise NotImplementedError(_ONLY_WRITES)

        async def deserialize(self, infos: Private, args: Private = None) -> Private:
            raise NotImplementedError(_ONLY_WRITES)

        async def serialize(self, values: Private, infos: Private, args: Private = None) -> Private:
            names.update((value.number, info.name) for value, info in zip(values, infos))
            return []

    return {kind: Named(kind) for kind in ("scalar", "np.ndarray")}


def _check_names(names: Sequence[str]) -> None:
    """Refuse arrays that orbax would keep under one name, or one inside of another."""
    for name, following in zip(names, names[1:]):
        if name == following or (name and following.startswith(f"{name}/")):
            raise CheckpointError(
                f"orbax-checkpoint keeps two leaves of this state as {name!r} and {following!r}, "
                "of which one would overwrite the other; rename one of their keys"
            )
