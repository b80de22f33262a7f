"""Caches of what is worked out of equations and programs, which keep no program alive.

Both compare by identity, so that a result is of use as long as its program is planned, or lowered.
Kept longer it would keep the program, with its constants, and each planning would hold more
(`benchmarks/planning_time.py --again 9`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from alpa_meta.types import Function

_Result = TypeVar("_Result")

_caches: list[functools._lru_cache_wrapper[object]] = []
_lock = threading.Lock()
_active = 0  # plannings and lowerings, in all threads


def cached_by_program(
    maxsize: int,
) -> Callable[[Function[_Result]], functools._lru_cache_wrapper[_Result]]:
    """Return a decorator of functions of equations or programs, like `functools.lru_cache`."""

    def decorate(function: Function[_Result]) -> functools._lru_cache_wrapper[_Result]:
        cached = functools.lru_cache(maxsize=maxsize)(function)
        _caches.append(cached)
        return cached

    return decorate


def forget_programs() -> None:
    """Empty the caches: they no longer hold, or may keep what nobody else needs."""
    for cached in _caches:
        cached.cache_clear()


@contextmanager
def programs_forgotten() -> Iterator[None]:
    """Empty the caches at the end, or where others are inside too, when the last one leaves."""
    global _active
    with _lock:
        _active += 1
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if not _active:
                forget_programs()
