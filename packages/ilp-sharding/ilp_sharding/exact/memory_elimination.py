"""Exact minimisation over a narrow graph under a few memory rows: elimination with labels.

Where plain elimination keeps one number per entry of a message, this keeps labels (cost c, usage u
[rows]): every way to choose the eliminated nodes that may matter for the entry. Two rules keep them
few. A label goes if another one of its entry has no more cost and no more usage. And with

    b_lambda = min over all ways to complete it of  cost + lambda . usage

known for some multipliers lambda >= 0 from two sweeps of plain elimination, a label goes if

    c + lambda . u + b_lambda - lambda . slack  >  cutoff      for one of them,

as no choice of cost <= cutoff that keeps the rows uses it (weak duality). The labels at the end are
the choices to pick from -> limited_minimum(). It is label setting as for constrained shortest paths
(Desrochers, Soumis 1988; with bounds: Dumitrescu, Boland 2003), over a tree of cliques.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np
from attrs import define

from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exceptions import OutOfTime

_WINDOW = 12  # labels of less cost that one is compared with, where there are several rows
_MARGIN = 1e-12  # of the numbers added up, for rounding


class TooManyLabels(Exception):
    """The elimination makes more labels than the caller allows."""


@define(eq=False)
class _Labels:
    """Labels of one step: `entry`, `cost`, `strategy` of the node [labels], `usage` [rows, labels].

    `children[i]` [labels] is the label of the i-th child that each was made from.
    """

    entry: np.ndarray
    cost: np.ndarray
    usage: np.ndarray
    strategy: np.ndarray
    children: list[np.ndarray]

    def taken(self, which: np.ndarray) -> _Labels:
        return _Labels(
            self.entry[which],
            self.cost[which],
            self.usage[:, which],
            self.strategy[which],
            [child[which] for child in self.children],
        )


def limited_minimum(
    elimination: Elimination,
    costs: Mapping[int, np.ndarray],
    usage: Mapping[int, np.ndarray],
    slack: np.ndarray,
    multipliers: np.ndarray,
    cutoff: float,
    *,
    until: float = math.inf,
    most: float = math.inf,
) -> tuple[float, dict[int, int]] | None:
    """Return (minimum, minimiser) of the choices of cost <= `cutoff` and usage <= `slack` [rows].

    None if there is none. `usage[i]` [rows, strategies of i]; `multipliers` [several, rows].
    Raises TooManyLabels once it made more than `most`, OutOfTime past `until`.
    """
    num_bounds = len(multipliers)
    priced = {i: costs[i] + multipliers @ usage[i] for i in elimination.order}
    up, outside = elimination.completions(priced, until=until)
    roots = [t for t, scope in enumerate(elimination.scopes) if not scope]
    remaining = sum((up[t] for t in roots), np.zeros(num_bounds))[:, None]
    if not (remaining < np.inf).all():
        return None
    limit = cutoff + multipliers @ slack
    limit += _MARGIN * (abs(cutoff) + multipliers @ np.abs(slack) + np.abs(remaining[:, 0]))

    def pruned(labels: _Labels, remaining: np.ndarray) -> _Labels:
        bound = labels.cost + multipliers @ labels.usage + remaining[:, labels.entry]
        return labels.taken((bound <= limit[:, None]).all(0))

    store: list[_Labels] = []
    for t, node in enumerate(elimination.order):
        if time.perf_counter() > until:
            raise OutOfTime
        shape, children = elimination.shape(t), elimination.children[t]
        size = shape[-1]
        cost = np.broadcast_to(elimination.clique(t, costs[node]), shape).ravel()
        places = [
            np.broadcast_to(
                elimination.fitted(np.arange(up[c][0].size).reshape(up[c].shape[1:]), c, t), shape
            ).ravel()
            for c in children
        ]
        messages = [
            up[c].reshape(num_bounds, -1)[:, place]
            for c, place in zip(children, places, strict=True)
        ]
        rest = np.repeat(outside[t].reshape(num_bounds, -1), size, axis=1)
        entry = np.flatnonzero((cost < np.inf) & (sum(messages, rest) < np.inf).all(0))
        strategy = entry % size
        labels = _Labels(entry, cost[entry], usage[node][:, strategy], strategy, [])
        labels = pruned(labels, sum(messages, rest))
        for number, (child, place) in enumerate(zip(children, places, strict=True)):
            labels = _joined(labels, store[child], place[labels.entry], most)
            most -= len(labels.entry)
            labels = pruned(labels, sum(messages[number + 1 :], rest))
        labels.entry = labels.entry // size
        store.append(_undominated(labels))
    one = np.zeros(1, np.int64)
    whole = _Labels(one, np.zeros(1), np.zeros((len(slack), 1)), one, [])
    for t in roots:
        remaining = remaining - up[t][:, None]
        whole = _joined(whole, store[t], np.zeros(len(whole.entry), np.int64), most)
        whole = _undominated(pruned(whole, remaining))
    fits = np.flatnonzero((whole.usage <= slack[:, None]).all(0) & (whole.cost <= cutoff))
    if not len(fits):
        return None
    best = int(fits[np.argmin(whole.cost[fits])])
    chosen: dict[int, int] = {}
    stack = [(t, int(label[best])) for t, label in zip(roots, whole.children, strict=True)]
    while stack:
        t, label = stack.pop()
        chosen[elimination.order[t]] = int(store[t].strategy[label])
        stack += [
            (child, int(its[label]))
            for child, its in zip(elimination.children[t], store[t].children, strict=True)
        ]
    return float(whole.cost[best]), chosen


def _joined(labels: _Labels, child: _Labels, place: np.ndarray, most: float) -> _Labels:
    """Return every label with every one of the `child` at its entry `place` [labels]."""
    start = np.searchsorted(child.entry, place, side="left")
    count = np.searchsorted(child.entry, place, side="right") - start
    total = int(count.sum())
    if total > most:
        raise TooManyLabels
    own = np.repeat(np.arange(len(count)), count)
    other = np.arange(total) - np.repeat(np.cumsum(count) - count - start, count)
    labels = labels.taken(own)
    labels.cost = labels.cost + child.cost[other]
    labels.usage = labels.usage + child.usage[:, other]
    labels.children.append(other)
    return labels


def _undominated(labels: _Labels) -> _Labels:
    """Return the labels sorted by entry, without those found to be dominated."""
    if len(labels.usage) == 1:
        labels = labels.taken(np.lexsort((labels.cost, labels.usage[0], labels.entry)))
        rank = np.unique(labels.cost, return_inverse=True)[1]
        key = rank - labels.entry * np.int64(len(rank) + 1)  # restarts at every entry
        lowest = np.minimum.accumulate(key)
        return labels.taken(np.append(True, key[1:] < lowest[:-1])[: len(key)])
    labels = labels.taken(np.lexsort((labels.usage.sum(0), labels.cost, labels.entry)))
    keep = np.ones(len(labels.cost), bool)
    for shift in range(1, min(_WINDOW, len(keep) - 1) + 1):
        same = labels.entry[shift:] == labels.entry[:-shift]
        keep[shift:] &= ~(same & (labels.usage[:, :-shift] <= labels.usage[:, shift:]).all(0))
    return labels.taken(keep)
