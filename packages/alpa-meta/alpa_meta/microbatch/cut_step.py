"""What a step cut into microbatches is: what one of them runs, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from alpa_meta.compat import ClosedJaxpr, Var
from alpa_meta.microbatch.placement import Placement


@frozen(eq=False)
class Given:
    """What every microbatch is given beside its inputs: its variable, kind and name.

    `kind` is "number", "statistic" (whole), "part" (of a statistic, along dim 0) or "total".
    """

    var: Var
    kind: str
    name: str


@frozen(eq=False)
class Statistics:
    """A program that runs once per step on the whole batch: it reads the step's inputs at the
    positions `inputs`, of which `of_batch` says which are split by the microbatches."""

    closed: ClosedJaxpr
    inputs: tuple[int, ...]
    of_batch: tuple[bool, ...]


@frozen(eq=False)
class Cut:
    """The program of one microbatch, whose last inputs are `given`.

    `totals` maps a given total to the microbatch's value that is added up to it. `origin` maps its
    variables to those of the whole program, where they differ. `reasons` say why it does not
    compute what the whole batch does, if it does not.
    """

    closed: ClosedJaxpr
    phases: tuple[str, ...]
    placements: Mapping[Var, Placement]
    given: tuple[Given, ...]
    statistics: Statistics | None
    totals: Mapping[Var, Var]
    reasons: tuple[str, ...]
    origin: Mapping[Var, Var] = field(factory=dict)
