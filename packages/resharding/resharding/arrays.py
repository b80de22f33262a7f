"""`reshard` without jax being imported before it is used: planning needs none."""

from __future__ import annotations

from typing import Any


def reshard(arrays: Any, shardings: Any, *, through: str = "auto") -> Any:
    """Return jax arrays of this process laid out by `shardings`, equal bit for bit.

    `resharding.jax_executor.reshard` says what it takes.
    """
    try:
        from resharding import jax_executor
    except ModuleNotFoundError as error:
        if error.name != "jax":
            raise
        raise ModuleNotFoundError(
            "resharding.reshard moves jax arrays and needs jax: pip install 'resharding[jax]'",
            name="jax",
        ) from None
    return jax_executor.reshard(arrays, shardings, through=through)
