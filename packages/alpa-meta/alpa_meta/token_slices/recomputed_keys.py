"""The keys of what the backward pass recomputes: from the first token on, for each slice anew.

Its sweep starts with the last slice, when those before it have recomputed nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from alpa_meta.compat import JaxprEqn, Var, array_type, is_drop
from alpa_meta.token_slices.moves import layout_of_moved, write_moved_from
from alpa_meta.token_slices.places import Layout
from alpa_meta.token_slices.reading import as_keys, keys_of
from alpa_meta.token_slices.recurrences import write_from_first
from alpa_meta.token_slices.values import Decision, Moved, Running, Sliced, TokenLoop, Window
from alpa_meta.token_slices.windows import layout_of_window, write_window_from

if TYPE_CHECKING:
    from alpa_meta.token_slices.writer import Writer


def write_recomputed(
    writer: Writer, eqn: JaxprEqn, decision: Decision, number: int
) -> Iterator[tuple[Var, Layout, Var]]:
    """Write an equation for the tokens up to a slice's last; yield each result, its layout and what
    was made for it."""
    layouts = tuple(map(keys_of, _layouts(eqn, decision)))
    made = [
        writer.result(var, layout, number) if any(layout) else Var(array_type(var))
        for var, layout in zip(eqn.outvars, layouts, strict=True)
    ]
    if isinstance(decision, Sliced):
        writer.run_operator(eqn, as_keys(decision.reading), number, made)
    elif isinstance(decision, Moved):
        for k, one in enumerate(made):
            write_moved_from(writer, eqn, decision, k, one, number, 0)
    elif isinstance(decision, Window):
        write_window_from(writer, eqn, decision, made[0], number, 0)
    else:
        assert isinstance(decision, Running | TokenLoop)
        write_from_first(writer, eqn, decision, made, number)
    for var, layout, one in zip(eqn.outvars, layouts, made, strict=True):
        if not is_drop(var):
            yield var, layout, one


def _layouts(eqn: JaxprEqn, decision: Decision) -> tuple[Layout, ...]:
    """Return the layouts of the results of an equation that a slice may look back on."""
    if isinstance(decision, Window):
        return (layout_of_window(eqn, decision),)
    if isinstance(decision, Moved):
        pairs = zip(eqn.outvars, decision.places, strict=True)
        return tuple(layout_of_moved(var, decision.dim, place) for var, place in pairs)
    if isinstance(decision, Running):
        return (decision.layout,)
    if isinstance(decision, TokenLoop):
        return decision.results
    assert isinstance(decision, Sliced)
    return decision.reading.results
