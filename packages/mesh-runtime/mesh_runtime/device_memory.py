"""How much memory jax may take of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def memory_of(devices: Sequence[Any]) -> float | None:
    """Return the least bytes that jax may take of these devices; None where it does not say.

    By default jax takes three quarters of a GPU (XLA_PYTHON_CLIENT_MEM_FRACTION).
    """
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((float(limit) for limit in limits if limit), default=None)
