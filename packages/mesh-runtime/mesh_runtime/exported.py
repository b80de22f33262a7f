"""Programs that travel to other processes: serialised by `jax.export`, with how to compile them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
from attrs import field, frozen


@frozen(kw_only=True)
class ExportedProgram:
    """A program serialised by `jax.export`.

    `donated` names the input values it may overwrite, `options` are XLA's. `shape` and `axis_names`
    are those of the mesh it was exported for, where they are not those of the mesh it runs on.
    """

    program: bytes = field(repr=False)
    donated: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(factory=dict, hash=False)
    shape: tuple[int, ...] = ()
    axis_names: tuple[str, ...] = ()

    @property
    def out_avals(self) -> Sequence[Any]:
        """The shapes and dtypes of what it gives."""
        return jax.export.deserialize(bytearray(self.program)).out_avals
