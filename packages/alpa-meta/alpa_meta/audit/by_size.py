"""Pays for compiled collectives of a program whose plan names none, by kind, axes and bytes.

Payment is sought in this order, from the strictest:

1. one planned collective of the same bytes, dtype and number of executions;
2. the same bytes and dtype, out of a loop of another length (unrolled, hoisted, length unknown);
3. several planned ones whose bytes add up (XLA's combiner);
4. all-reduces of the same bytes along axes that together are the compiled one's (folded);
5. the smallest planned one, or several, with at least as many bytes (less data than planned).

Taking the strictest first never makes a later payment impossible: an equal can always be exchanged.
Without names, a collective that was added can pass for a larger one of its kind and axes that was
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from alpa_meta.audit.demand import Demand, Payment, Supply, folded, less_note, loop_note, payable

MAX_SUMS = 100_000
"""Partial sums tried to explain one merged collective before it counts as less data."""


def pay_by_size(
    demands: Sequence[Demand], supplies: Sequence[Supply], *, less_data: bool = True
) -> None:
    """Fill `paid` of every demand that can be paid, strictest rule first, then the largest and most
    often run demand.

    Without `less_data`, the last rule is left out.
    """
    exact = (_equal, _equal_in_another_loop, _added_up, folded)
    attempts = [(narrow, rule) for narrow in (False, True) for rule in exact]
    if less_data:
        attempts += [(False, _with_less_data), (True, _with_less_data)]
    largest_first = sorted(
        demands, key=lambda demand: (-demand.compiled_bytes, -(demand.trips or math.inf))
    )
    for narrow, rule in attempts:
        for demand in largest_first:
            if demand.paid or narrow not in demand.widened:
                continue
            demand.narrow = narrow
            usable = [supply for supply in supplies if supply.covers(demand.trips)]
            demand.take(*rule(demand, usable))


def _equal(demand: Demand, supplies: Sequence[Supply]) -> Payment:
    for supply in payable(demand, supplies):
        if (supply.planned.bytes, supply.planned.trips) == (demand.bytes, demand.trips):
            return [supply], ""
    return [], ""


def _equal_in_another_loop(demand: Demand, supplies: Sequence[Supply]) -> Payment:
    equal = [one for one in payable(demand, supplies) if one.planned.bytes == demand.bytes]
    if not equal:
        return [], ""
    # of a loop that XLA peeled or unrolled, what the longest part leaves pays for the rest
    supply = min(equal, key=lambda one: math.inf if one.left is None else one.left)
    return [supply], loop_note(supply.planned, demand)


def _added_up(demand: Demand, supplies: Sequence[Supply]) -> Payment:
    """Return planned collectives of equal trips whose bytes add up to the demand's."""
    fitting = payable(demand, supplies)
    same_loop = [supply for supply in fitting if supply.planned.trips == demand.trips]
    reached: dict[int, list[Supply]] = {0: []}
    for supply in same_loop:
        for total, chosen in list(reached.items()):
            longer = total + supply.planned.bytes
            if longer <= demand.bytes and longer not in reached:
                reached[longer] = [*chosen, supply]
        if demand.bytes in reached or len(reached) > MAX_SUMS:
            break
    return reached.get(demand.bytes, []), "merged"


def _with_less_data(demand: Demand, supplies: Sequence[Supply]) -> Payment:
    """Return the smallest sufficient planned collective, else the largest ones that suffice."""
    fitting = [
        supply
        for supply in supplies
        if (supply.planned.kind, supply.axes) == (demand.kind, demand.axes)
        and (not demand.narrow or supply.planned.dtype in demand.dtypes)
    ]
    ascending = sorted(fitting, key=lambda supply: supply.planned.bytes)
    for supply in ascending:
        if supply.planned.bytes >= demand.bytes:
            return [supply], less_note([supply], demand)
    chosen: list[Supply] = []
    for supply in reversed(ascending):
        chosen.append(supply)
        if sum(one.planned.bytes for one in chosen) >= demand.bytes:
            return chosen, less_note(chosen, demand)
    return [], ""
