"""What a caller may set for one `solve`, and what the solver tells while it runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen


@frozen(kw_only=True)
class Progress:
    """One report of a running solve: seconds since its start, best cost so far, proven bound."""

    seconds: float
    objective: float | None
    lower_bound: float
    phase: str


def _pins(value: Mapping[int, int] | None) -> dict[int, int]:
    return {operator.index(node): operator.index(s) for node, s in dict(value or {}).items()}


def _pairs(value: Any) -> frozenset[tuple[int, int]]:
    return frozenset((operator.index(node), operator.index(s)) for node, s in value)


def _choice(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(operator.index(s) for s in value)


def _deadline(instance: Any, attribute: Any, value: float) -> None:
    if math.isnan(value) or value < 0:
        raise ValueError(
            f"SolveOptions.deadline must be seconds of at least 0, got {value!r}; "
            "leave it out for none"
        )


def _tolerance(instance: Any, attribute: Any, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"SolveOptions.gap_tolerance must be finite and at least 0, got {value!r}")


def _workers(instance: Any, attribute: Any, value: int) -> None:
    if not 1 <= value <= 64:
        raise ValueError(f"SolveOptions.num_workers must be 1..64, got {value!r}")


def _rounds(instance: Any, attribute: Any, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"SolveOptions.rounds must be at least 1, got {value!r}")


@frozen(kw_only=True)
class SolveOptions:
    """Options of `solve`.

    `deadline`: wall-clock seconds for everything, `inf` for none. `num_workers`: processes for
    problems too large to solve directly; small problems always stay in this process. `rounds`:
    search those for that many rounds in this process instead, and bound the trees of integer
    programs, which gives the same answer every time. `seed`: same problem, options and seed give
    the same choice, cost and bound, as long as no deadline cuts the search short and no worker
    processes are needed.
    `warm_start`: a previous choice to start from; entries that no longer fit are replaced. `pins`:
    {node: strategy} to fix; `forbid`: {(node, strategy)} to exclude. `gap_tolerance`: stop once
    (objective - bound) / |bound| is at most this. `bound_only`: the caller wants the bound, and any
    choice; where messages leave a gap, no better choice is looked for. `progress` is called in the
    caller's thread.
    """

    deadline: float = field(default=math.inf, converter=float, validator=_deadline)
    num_workers: int = field(default=2, converter=operator.index, validator=_workers)
    rounds: int | None = field(default=None, validator=_rounds)
    seed: int = field(default=0, converter=operator.index)
    warm_start: tuple[int, ...] | None = field(default=None, converter=_choice)
    pins: Mapping[int, int] = field(factory=dict, converter=_pins)
    forbid: frozenset[tuple[int, int]] = field(default=frozenset(), converter=_pairs)
    gap_tolerance: float = field(default=0.0, converter=float, validator=_tolerance)
    bound_only: bool = False
    progress: Callable[[Progress], None] | None = None
