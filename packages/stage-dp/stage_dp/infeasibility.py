"""The error for problems that no plan solves."""

from __future__ import annotations


class InfeasibleError(ValueError):
    """No plan fits. `missing_bytes` is per device (0.0 where memory is not the reason).

    `remedy` is the cheapest change found that makes a plan possible.
    """

    def __init__(self, message: str, *, missing_bytes: float = 0.0, remedy: str = "") -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.remedy = remedy
