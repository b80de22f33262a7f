"""The loops over all tables of `flat_graph`, compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from ilp_sharding.problem.flat_graph import Tables


@njit(cache=True)
def drop_unsupported(tables: Tables, active: np.ndarray) -> bool:
    """Clear `active` for strategies without an allowed partner; return False if a node has none
    left.
    """
    offset = tables.offset
    changed = True
    while changed:
        changed = False
        for e in range(len(tables.first)):
            i, j = tables.first[e], tables.second[e]
            width = offset[j + 1] - offset[j]
            p = tables.entry_offset[e]
            for a in range(offset[i + 1] - offset[i]):
                if active[offset[i] + a]:
                    found = False
                    for b in range(width):
                        if active[offset[j] + b] and tables.entry[p + a * width + b] < np.inf:
                            found = True
                            break
                    if not found:
                        active[offset[i] + a] = False
                        changed = True
            for b in range(width):
                if active[offset[j] + b]:
                    found = False
                    for a in range(offset[i + 1] - offset[i]):
                        if active[offset[i] + a] and tables.entry[p + a * width + b] < np.inf:
                            found = True
                            break
                    if not found:
                        active[offset[j] + b] = False
                        changed = True
    for i in range(len(offset) - 1):
        found = False
        for v in range(offset[i], offset[i + 1]):
            found = found or active[v]
        if not found:
            return False
    return True


@njit(cache=True)
def keep_active(
    tables: Tables, active: np.ndarray, is_open: np.ndarray, cost: np.ndarray, entry: np.ndarray
) -> float:
    """Write what is left of the tables of two open nodes into `entry`; return the settled cost.

    `active` [strategies] are kept, one of every node that is not open. A table of a settled and an
    open node goes to `cost` [strategies], one of two settled nodes to the result.
    """
    offset = tables.offset
    settled, place = 0.0, 0
    for e in range(len(tables.first)):
        i, j = tables.first[e], tables.second[e]
        width = offset[j + 1] - offset[j]
        for a in range(offset[i + 1] - offset[i]):
            if not active[offset[i] + a]:
                continue
            p = tables.entry_offset[e] + a * width
            for b in range(width):
                if not active[offset[j] + b]:
                    continue
                if is_open[i] and is_open[j]:
                    entry[place] = tables.entry[p + b]
                    place += 1
                elif is_open[i]:
                    cost[offset[i] + a] += tables.entry[p + b]
                elif is_open[j]:
                    cost[offset[j] + b] += tables.entry[p + b]
                else:
                    settled += tables.entry[p + b]
    return settled
