"""Pays for compiled collectives by the names their planned ones were emitted under.

The executor emits every planned collective in a name scope of its own, and XLA keeps it on whatever
the collective becomes: a merged one carries the names of all its parts. So each compiled collective
says which planned ones it is, and is held to them: their kind, their axes, no more bytes, no more
executions. One that carries no planned name was added, however small it is and whatever else was
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from alpa_meta.audit.demand import Demand, Payment, Supply, folded, less_note, loop_note, payable

_MOVING = ("all-gather", "all-to-all", "collective-permute")
"""Kinds that leave every element as it is."""


def pay_by_name(groups: Sequence[Sequence[Demand]], supplies: Sequence[Supply]) -> None:
    """Fill `paid` of every demand that its own names pay for.

    `groups` are the tensors of each compiled collective. In this order, over all of them:

    1. one of its names, of the same bytes;
    2. all of its names, or all of one of the buckets merged into it, if their bytes add up (sent
       in one buffer);
    3. all-reduces of the same bytes along axes that together are the compiled one's, one of them
       its own (folded);
    4. one of its names with more bytes, else all of them together (less data than planned);
    5. one of its names, of as many numbers, for truth values that are turned into numbers only when
       they have arrived.
    """
    named: dict[str, list[Supply]] = {}
    for supply in supplies:
        named.setdefault(supply.planned.scope, []).append(supply)
    for rule in (_equal, _all, _folded, _larger, _truth):
        for group in groups:
            own = [one for name in group[0].names() for one in named.get(name, ())] if group else []
            for demand in sorted(group, key=lambda demand: -demand.compiled_bytes):
                for narrow in demand.widened if own else ():
                    if not demand.paid:
                        demand.narrow = narrow
                        usable = [one for one in own if one.covers(demand.trips)]
                        demand.take(*rule(demand, usable, supplies))


def _equal(demand: Demand, own: Sequence[Supply], _: Sequence[Supply]) -> Payment:
    for supply in payable(demand, own):
        if supply.planned.bytes == demand.bytes:
            return [supply], loop_note(supply.planned, demand)
    return [], ""


def _all(demand: Demand, own: Sequence[Supply], _: Sequence[Supply]) -> Payment:
    fitting = payable(demand, own)
    buckets = [[one for one in fitting if one.planned.scope in names] for names in demand.buckets()]
    for together in (fitting, *buckets):
        if len(together) > 1 and sum(one.planned.bytes for one in together) == demand.bytes:
            return together, f"merged {len(together)}"
    return [], ""


def _folded(demand: Demand, own: Sequence[Supply], supplies: Sequence[Supply]) -> Payment:
    others = [one for one in supplies if one not in own and one.covers(demand.trips)]
    chosen, note = folded(demand, [*own, *others]) if own else ([], "")
    return (chosen, note) if any(one in own for one in chosen) else ([], "")


def _larger(demand: Demand, own: Sequence[Supply], _: Sequence[Supply]) -> Payment:
    fitting = payable(demand, own)
    larger = [one for one in fitting if one.planned.bytes > demand.bytes]
    if larger:
        fitting = [min(larger, key=lambda supply: supply.planned.bytes)]
    if sum(one.planned.bytes for one in fitting) < demand.bytes:
        return [], ""
    return fitting, less_note(fitting, demand)


def _truth(demand: Demand, own: Sequence[Supply], _: Sequence[Supply]) -> Payment:
    if demand.compiled_dtype != "bool" or demand.kind not in _MOVING:
        return [], ""
    for supply in own:
        planned = supply.planned
        numbers = planned.bytes // jnp.dtype(planned.dtype).itemsize
        if (planned.kind, supply.axes, numbers) == (demand.kind, demand.axes, demand.bytes):
            return [supply], less_note([supply], demand)
    return [], ""


def deviation(demand: Demand, supplies: Sequence[Supply]) -> str:
    """Return how an unpaid demand differs from the planned collectives whose names it carries."""
    names = set(demand.names())
    own = [one for one in supplies if one.planned.scope in names]
    if not own:
        return "added: no planned collective was emitted under its name"
    planned = own[0].planned
    if all(one.planned.kind != demand.kind for one in own):
        return f"kind changed: the plan says {planned.kind} of {planned.bytes} bytes"
    if all(one.axes != demand.axes for one in own):
        return f"axes changed: the plan says {', '.join(own[0].axes)}"
    total = sum(one.planned.bytes for one in own)
    if demand.compiled_bytes > total:
        return f"more bytes: the plan says {total}"
    if all(one.left is not None and one.left < (demand.trips or 1) for one in own):
        return f"runs again: the plan says {planned.trips} times in all"
    return f"dtype changed: the plan says {planned.dtype}"
