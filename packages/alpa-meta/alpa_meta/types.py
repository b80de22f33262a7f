"""The names of what no narrower type describes; `Any` is written here and nowhere else.

The rest of the package says what its values are, and `./dev check` refuses an `Any` there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

if TYPE_CHECKING:  # `alpa --help` imports no numpy
    import numpy as np
    from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

PyTree: TypeAlias = Any
"""A pytree of the user's, or one of its leaves: containers of any classes, known to jax.tree."""

Function: TypeAlias = Callable[..., R]
"""A function of some number of arguments, as the user's step has: no type says "a few arrays"."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation: each primitive has its own, and jax types them as this."""

Fields: TypeAlias = dict[str, Any]
"""Values by name, each of a type of its own: what a class or a function is given by `**`."""

Private: TypeAlias = Any
"""A value of a class that its library does not export, such as the context of an equation."""

DType: TypeAlias = "np.dtype[Any]"
"""A dtype, or an extended one of jax; numpy's scalar types have a type parameter of their own."""

Floats: TypeAlias = "NDArray[np.float64]"
Ints: TypeAlias = "NDArray[np.int64]"
Flags: TypeAlias = "NDArray[np.bool_]"
HostArray: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[Any]]"
"""Arrays of numpy: of costs, of positions, of masks, and of any dtype."""

Spec: TypeAlias = Iterable[Private]
"""A partition spec: per dim an axis, several, None, or UNCONSTRAINED, whose class is private."""

Remembered: TypeAlias = Any
"""What a cache holds that several functions share: each knows the type of its own entries."""
