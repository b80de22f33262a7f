"""Handles of arrays that live on the devices of other processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from mesh_runtime.layout import Layout


class StaleArrayError(RuntimeError):
    """An array was given to a step that overwrote it; the message says which and what to do."""


class Owner(Protocol):
    """What holds the arrays behind handles."""

    def fetch(self, buffers: Sequence[Buffer]) -> list[NDArray[Any]]:
        """Return arrays whole on the host."""
        ...

    def release(self, number: int) -> None:
        """Note that nobody refers to an array any more."""
        ...


class Buffer:
    """An array in the memory of workers, until the last handle of it is dropped or it is gone.

    `meshes` are those that hold it, `value` is it on the host, if it was sent along. `gone` says
    why it is no more.
    """

    __slots__ = ("dtype", "gone", "layout", "meshes", "number", "owner", "shape", "value")

    def __init__(
        self,
        owner: Owner,
        number: int,
        meshes: Sequence[int],
        shape: Sequence[int],
        dtype: Any,
        layout: Layout,
        value: NDArray[Any] | None = None,
    ) -> None:
        self.owner, self.number, self.meshes = owner, number, tuple(meshes)
        self.shape, self.dtype, self.layout = tuple(shape), jnp.dtype(dtype), layout
        self.value = value
        self.gone = ""

    def __del__(self) -> None:
        if self.value is None:
            self.owner.release(self.number)


class RemoteArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A handle of an array that lives on a mesh of other processes.

    It has shape, dtype and sharding, and turns into an array of this process where it is asked to:
    `np.asarray(x)`, `float(x)`, `x.fetch()`, `jax.device_get(x)`, arithmetic, numpy's methods
    (`x.mean()`). Passed back to a step, it stays where it is. A handle of random keys (`key_impl`)
    stands for their words.
    """

    __slots__ = ("buffer", "key_impl")

    def __init__(self, buffer: Buffer, key_impl: str | None = None) -> None:
        self.buffer, self.key_impl = buffer, key_impl

    def as_keys(self, key_impl: str) -> RemoteArray:
        """Return this array of key words as random keys of an implementation."""
        return RemoteArray(self.buffer, key_impl)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.buffer.shape if self.key_impl is None else self.buffer.shape[:-1]

    @property
    def dtype(self) -> Any:
        """The dtype."""
        if self.key_impl is None:
            return self.buffer.dtype
        return jax.eval_shape(lambda: jax.random.key(0, impl=self.key_impl)).dtype

    @property
    def sharding(self) -> NamedSharding:
        """How the array lies on its mesh, which has no devices in this process."""
        return self.buffer.layout.sharding()

    @property
    def owner(self) -> Owner:
        """The workers that hold the array."""
        return self.buffer.owner

    @property
    def meshes(self) -> tuple[int, ...]:
        """The numbers of the meshes that hold it."""
        return self.buffer.meshes

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return int(np.prod(self.buffer.shape)) * int(self.buffer.dtype.itemsize)

    def is_deleted(self) -> bool:
        """Return whether a step has overwritten the array."""
        return bool(self.buffer.gone)

    def block_until_ready(self) -> RemoteArray:
        """Return this array: a step that makes handles is done when it returns."""
        return self

    def fetch(self) -> Any:
        """Return the array whole on the host: numpy, or a key array for random keys."""
        return fetched([self])[0]

    def item(self) -> Any:
        """Return the one element as a Python number."""
        return self.fetch().item()

    def __getattr__(self, name: str) -> Any:
        """Return what the array on the host has under a public name that numpy's arrays have:
        `mean`, `astype`, `tolist`, `T`, `real`, ..."""
        if name.startswith("_") or name in RemoteArray.__slots__ or not hasattr(np.ndarray, name):
            raise AttributeError(f"a RemoteArray has no attribute {name!r}")
        return getattr(self.fetch(), name)

    def __copy__(self) -> RemoteArray:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self!r} is a handle of what workers hold, which cannot be pickled or copied; take "
            "step.gather(state), or write it by alpa.save"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        whole = np.asarray(self.fetch())
        return whole if dtype is None else whole.astype(dtype)

    def __jax_array__(self) -> Any:
        return jnp.asarray(self.fetch())

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        given = [one.fetch() if isinstance(one, RemoteArray) else one for one in inputs]
        return getattr(ufunc, method)(*given, **keywords)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.item(), digits)

    def __float__(self) -> float:
        return float(self.fetch())

    def __int__(self) -> int:
        return int(self.fetch())

    def __index__(self) -> int:
        return self.fetch().__index__()  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return bool(self.fetch())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return self.fetch()[key]

    def __format__(self, spec: str) -> str:
        return format(self.fetch()[()], spec)

    def __str__(self) -> str:
        return repr(self) if self.is_deleted() else str(self.fetch())

    def __repr__(self) -> str:
        where = ", ".join(map(str, self.meshes))
        state = ", gone" if self.is_deleted() else ""
        return f"RemoteArray({self.dtype}{list(self.shape)} on mesh {where}{state})"


def fetched(arrays: Iterable[RemoteArray]) -> list[Any]:
    """Return arrays whole on the host, all of one owner by one request."""
    arrays = list(arrays)
    wanted: dict[Owner, dict[int, Buffer]] = {}
    for array in arrays:
        buffer = array.buffer
        if buffer.gone:
            raise StaleArrayError(f"{array!r}: {buffer.gone}")
        if buffer.value is None:
            wanted.setdefault(buffer.owner, {})[buffer.number] = buffer
    found = {
        buffer.number: value
        for owner, buffers in wanted.items()
        for buffer, value in zip(buffers.values(), owner.fetch(list(buffers.values())), strict=True)
    }
    values = []
    for array in arrays:
        words: Any = array.buffer.value
        if words is None:
            words = found[array.buffer.number]
        if array.key_impl is not None:
            words = jax.random.wrap_key_data(jnp.asarray(words), impl=array.key_impl)
        values.append(words)
    return values
