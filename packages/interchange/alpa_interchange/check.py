"""Validators shared by the schema: each raises ValueError with the field, the rule and the
value."""

from __future__ import annotations

import math
from typing import Any


def positive(owner: Any, attribute: Any, value: Any) -> None:
    """Require a finite number above zero."""
    if not value > 0 or not math.isfinite(value):
        raise ValueError(f"{_place(owner, attribute)} must be above 0, got {value!r}")


def non_negative(owner: Any, attribute: Any, value: Any) -> None:
    """Require a finite number of at least zero."""
    if not value >= 0 or not math.isfinite(value):
        raise ValueError(f"{_place(owner, attribute)} must be at least 0, got {value!r}")


def share(owner: Any, attribute: Any, value: float) -> None:
    """Require a number above zero and at most one."""
    if not 0 < value <= 1:
        raise ValueError(f"{_place(owner, attribute)} must be above 0 and at most 1, got {value!r}")


def non_empty(owner: Any, attribute: Any, value: Any) -> None:
    """Require a string or sequence with at least one item."""
    if not len(value):
        raise ValueError(f"{_place(owner, attribute)} must not be empty")


class OneOf:
    """A validator that requires one of some words; readers of the schema may ask which."""

    def __init__(self, *options: str) -> None:
        self.options = options

    def __call__(self, owner: Any, attribute: Any, value: Any) -> None:
        if value not in self.options:
            place = _place(owner, attribute)
            raise ValueError(f"{place} must be one of {self.options}, got {value!r}")


def _place(owner: Any, attribute: Any) -> str:
    return f"{type(owner).__name__}.{attribute.name}"
