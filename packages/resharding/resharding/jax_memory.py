"""The arrays of jax on GPUs, as the NCCL transport sees them: memory, and when it may be touched.

dlpack says both, without copies: exporting an array makes a stream wait until XLA has computed it
and keeps its memory (a program that is given the array to overwrite then copies it); importing one
makes XLA wait for an event. Receives go into arrays that XLA has allocated, so they count as its
memory. Elements that dlpack does not know travel as unsigned integers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from resharding.device_executor import Corners
from resharding.device_executor import join as join_pieces
from resharding.device_order import Order
from resharding.nccl_transport import Exported
from resharding.slices import Box

_CUDA = 2  # kDLCUDA


class JaxMemory:
    """jax devices of this process, by the numbers that plans give them."""

    def __init__(self, devices: Mapping[int, Any]) -> None:
        self._devices = dict(devices)

    def cuda_index(self, device: int) -> int:
        """Return the number that CUDA gives a device here."""
        return int(self._devices[device].local_hardware_id)

    def cut(self, tile: jax.Array, start: tuple[int, ...], boxes: Sequence[Box]) -> list[jax.Array]:
        """Return boxes of a tile; one that is all of it is not copied."""
        whole = [box.start == start and box.shape == tile.shape for box in boxes]
        carrier = carrier_of(str(tile.dtype))
        if all(whole) and carrier == tile.dtype:
            return [tile] * len(boxes)
        corners = tuple(
            (
                tuple(a - base for a, base in zip(box.start, start, strict=True)),
                tuple(b - base for b, base in zip(box.stop, start, strict=True)),
            )
            for box in boxes
        )
        return list(_cut(tile, corners, carrier))

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> jax.Array:
        """Return memory of XLA that will be written by others."""
        return jnp.zeros(shape, carrier_of(dtype), device=self._devices[device])

    def export(self, array: jax.Array, stream: int | None) -> Exported:
        """Return an array's memory; `stream` waits until the array is computed."""
        owner: Any = array
        capsule = owner.__dlpack__(stream=stream)
        return Exported(_pointer(capsule), array.nbytes, capsule)

    def adopt(self, array: jax.Array, event: Any) -> jax.Array:
        """Return an array over the memory of `array`; programs that read it wait for `event`."""
        adopted: jax.Array = jax.dlpack.from_dlpack(_Arrived(array, event), copy=False)
        return adopted

    def join(self, pieces: Sequence[jax.Array], order: Order, dtype: str) -> jax.Array:
        """Return a tile put together from pieces."""
        if isinstance(order, int) and pieces[order].dtype == dtype:
            return pieces[order]
        joined: jax.Array = _join(tuple(pieces), order, dtype)
        return joined


class _Arrived:
    """An array that is there when an event is done, for whoever imports it."""

    def __init__(self, array: Any, event: Any) -> None:
        self._array, self._event = array, event

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._array.__dlpack_device__()
        return int(kind), int(number)

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """Return the memory; the importer's stream waits for the event, and for nothing else."""
        if stream is not None and self.__dlpack_device__()[0] == _CUDA:
            import cupy

            cupy.cuda.ExternalStream(stream).wait_event(self._event)
        return self._array.__dlpack__(**options)


def carrier_of(dtype: str) -> Any:
    """Return the dtype in which elements travel: of the same width, and known to dlpack."""
    known = jnp.dtype(dtype)
    if not jnp.issubdtype(known, jnp.integer) and not jnp.issubdtype(known, jnp.floating):
        return known  # bool and complex numbers
    return jnp.dtype("uint8") if _bits(known) < 8 or dtype.startswith("float8") else known


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(tile: jax.Array, corners: tuple[Corners, ...], carrier: Any) -> tuple[jax.Array, ...]:
    pieces = (jax.lax.slice(tile, start, stop) for start, stop in corners)
    return tuple(_carried(piece, carrier) for piece in pieces)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(pieces: tuple[jax.Array, ...], order: Order, dtype: str) -> jax.Array:
    return _carried_back(join_pieces(pieces, order), jnp.dtype(dtype))


def _carried(piece: jax.Array, carrier: Any) -> jax.Array:
    if piece.dtype == carrier:
        return piece
    bits = _bits(piece.dtype)
    words = jax.lax.bitcast_convert_type(piece, jnp.dtype(f"uint{bits}"))
    return words.astype(carrier)


def _carried_back(piece: jax.Array, dtype: Any) -> jax.Array:
    if piece.dtype == dtype:
        return piece
    words = piece.astype(jnp.dtype(f"uint{_bits(dtype)}"))
    return jax.lax.bitcast_convert_type(words, dtype)


def _bits(dtype: Any) -> int:
    info: Any = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return int(info(dtype).bits)


def _pointer(capsule: Any) -> int:
    """Return where the memory of a dlpack capsule begins."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = get(capsule, b"dltensor")
    data = ctypes.c_void_p.from_address(tensor).value or 0
    return data + ctypes.c_uint64.from_address(tensor + _BYTE_OFFSET).value


_BYTE_OFFSET = 40  # in DLTensor: data, device (2 x 4), ndim, dtype (4), shape, strides, byte_offset
