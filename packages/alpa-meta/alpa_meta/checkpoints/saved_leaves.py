"""What a manifest may say of a leaf: anything else is refused before a file is opened for it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from attrs import frozen

from mesh_runtime import StoredArray

SCALARS = {"bool": bool, "int": int, "float": float}  # what orbax gives back as Python numbers
VALUES = {**SCALARS, "complex": complex, "str": str}
_MAX_KEYS = 500  # deeper pytrees than Python's recursion lets jax flatten


@frozen(kw_only=True)
class SavedLeaf:
    """A leaf of a state. `kind` is "array", "key" (random keys, whose words are the array) or the
    name of a Python type, whose `value` is text. `keys` lead to it: "name" of a dict or an object,
    "[2]" of a list."""

    path: str
    keys: tuple[str, ...] = ()
    kind: str = "array"
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    impl: str = ""
    value: str | None = None

    @property
    def stored(self) -> StoredArray:
        """The array in the files."""
        return StoredArray(self.name, self.shape, self.dtype)

    def fault(self) -> str:
        """Return what cannot be so of this leaf, "" if it may be."""
        if len(self.keys) > _MAX_KEYS:
            return f"more than {_MAX_KEYS} levels deep"
        if self.kind not in ("array", "key", *VALUES):
            return f"of the unknown kind {self.kind[:40]!r}"
        described = f"{self.dtype[:40]}{list(self.shape[:8])}"
        if self.dtype and not (is_stored_dtype(self.dtype) and min(self.shape, default=0) >= 0):
            return f"an array that nothing can hold: {described}"
        if self.kind in VALUES:
            if not _is_value(self.kind, self.value):
                return f"which has no {self.kind} as its value"
            return f"a {self.kind} that is an array: {described}" if self.shape else ""
        if not self.dtype or self.value is not None:
            return "an array without a dtype, or with a value beside it"
        if self.kind == "key" and keys_shape(self.shape, self.dtype, self.impl) is None:
            return f"which cannot be random keys {self.impl[:40]!r}: its words are {described}"
        return ""


def is_stored_dtype(dtype: str) -> bool:
    """Return whether arrays of a dtype are saved."""
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        return False
    return bool(jnp.issubdtype(found, jnp.number) or found == jnp.bool_)


def keys_shape(shape: Sequence[int], dtype: str, impl: str) -> tuple[int, ...] | None:
    """Return the shape of the random keys whose words an array is, None if it cannot be that."""
    words = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
    try:
        found = jax.eval_shape(lambda given: jax.random.wrap_key_data(given, impl=impl), words)
    except (TypeError, ValueError):
        return None
    return tuple(found.shape)


def _is_value(kind: str, value: str | None) -> bool:
    """Return whether text is a value of a Python type."""
    if value is None or kind == "bool":
        return value in ("True", "False")
    try:
        VALUES[kind](value)
    except ValueError:
        return False
    return True
