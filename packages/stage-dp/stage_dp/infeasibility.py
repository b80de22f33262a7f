"""The errors of the searches: no plan solves the problem, or a bound is wrong."""

from __future__ import annotations


class InfeasibleError(ValueError):
    """No plan fits. `missing_bytes` is per device (0.0 where memory is not the reason).

    `remedy` is the cheapest change found that makes a plan possible.
    """

    def __init__(self, message: str, *, missing_bytes: float = 0.0, remedy: str = "") -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.remedy = remedy


class BoundError(AssertionError):
    """A plan is below the bound that was proven for it: the proof or the costs are wrong."""


def check_bound(bound: float, step_seconds: float, what: str) -> None:
    """Raise BoundError if a plan is below a bound that holds for it, beyond rounding."""
    if step_seconds < bound * (1 - 1e-9):
        raise BoundError(
            f"{what} takes {step_seconds!r} s, below the bound of {bound!r} s proven for it: the "
            "proof or the costs are wrong; please report it with the step and the cluster"
        )
