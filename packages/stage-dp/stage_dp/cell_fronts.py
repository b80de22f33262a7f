"""All ways worth having to run a layer range on a mesh: labels by min-plus over its layers.

A label sums seconds forward and backward, step seconds, state and activation bytes, and keeps the
largest transient; it remembers the layouts at both ends. Of labels with the same layouts, one that
another equals or beats in every column is dropped. No step time can be lost by that: the longest
path grows with each column, and memory with the bytes. Equal layers in another order give equal
labels, of which one stays, so ranges of equal layers have few.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from stage_dp.menu_table import (
    ACTIVATION,
    ADDED,
    BACKWARD,
    FORWARD,
    STATE,
    TRANSIENT,
    Array,
    Index,
    MenuTable,
    Sequences,
    compared,
    unbeaten,
)


@frozen(eq=False)
class Front:
    """Labels of one layer range on one mesh. `columns` [labels, COLUMNS] as in ClassRows."""

    columns: Array
    layout_in: Index
    layout_out: Index
    before: Index  # label of the range without its last layer
    row: Index  # of the last layer, as position in the menu


class TooManyLabelsError(Exception):
    """The labels of a range are more than the search may keep."""


class Fronts:
    """Fronts of one menu table, made when asked for. `labels_left` limits the work."""

    def __init__(self, table: MenuTable, sequences: Sequences, labels_left: int) -> None:
        self.table = table
        self.sequences = sequences
        self.labels_left = labels_left
        self._made: dict[tuple[int, int], Front] = {}

    def front(self, sequence: int, mesh: int) -> Front:
        """Return the front; raises TooManyLabelsError when the limit is reached."""
        key = (sequence, mesh)
        if key not in self._made:
            self._made[key] = self._extended(sequence, mesh)
        return self._made[key]

    def rows(self, sequence: int, mesh: int, label: int) -> tuple[int, ...]:
        """Return the row number of each layer."""
        result = []
        while sequence >= 0:
            front = self.front(sequence, mesh)
            result.append(int(front.row[label]))
            label = int(front.before[label])
            sequence = self.sequences.parent[sequence]
        return tuple(reversed(result))

    def _extended(self, sequence: int, mesh: int) -> Front:
        rows = self.table.rows[mesh][self.sequences.last[sequence]]
        parent = self.sequences.parent[sequence]
        if parent < 0:
            columns, layout_in = rows.columns, rows.layout_in
            before = np.zeros(len(columns), dtype=np.int64)
            pick = np.arange(len(columns))
        else:
            start = self.front(parent, mesh)
            change = self.table.conversion[mesh][np.ix_(start.layout_out, rows.layout_in)]
            before, pick = np.nonzero(np.isfinite(change))
            old, new = start.columns[before], rows.columns[pick]
            columns = np.empty_like(old)
            columns[:, ADDED] = old[:, ADDED] + new[:, ADDED]
            columns[:, TRANSIENT] = np.maximum(old[:, TRANSIENT], new[:, TRANSIENT])
            # Conversions are given forward and backward together.
            columns[:, FORWARD] += change[before, pick] / 2
            columns[:, BACKWARD] += change[before, pick] / 2
            layout_in = start.layout_in[before]
        need = columns[:, STATE] + columns[:, ACTIVATION] + columns[:, TRANSIENT]
        fits = np.flatnonzero(need <= self.table.memory[mesh])
        self.labels_left -= len(fits)
        if self.labels_left < 0:
            raise TooManyLabelsError
        columns, before, pick, layout_in = columns[fits], before[fits], pick[fits], layout_in[fits]
        layout_out = rows.layout_out[pick]
        best = unbeaten(compared(columns, self.table.splits), layout_in * 4096 + layout_out)
        return Front(
            columns[best], layout_in[best], layout_out[best], before[best], rows.number[pick[best]]
        )
