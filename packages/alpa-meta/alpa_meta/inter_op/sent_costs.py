"""What a stage's collectives take of its step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa_meta.intra_op.selection import Selection


def collective_seconds(selection: Selection, choice: Sequence[int]) -> dict[str, float]:
    """Return the seconds per step that a choice spends in collectives, by phase."""
    phases = selection.stage.phases
    found = dict.fromkeys(("forward", "backward", "update"), 0.0)
    parts = selection.sent.under(len(phases), choice).sum(axis=(1, 2))
    for k in np.flatnonzero(parts).tolist():
        found[phases[k]] += float(parts[k])
    for phase, seconds in selection.traffic.extra(choice).items():
        found[phase] += seconds
    return found
