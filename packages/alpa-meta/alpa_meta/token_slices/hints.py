"""Where the tokens lie in inputs and values of the batch alone, such as targets and segments."""

from __future__ import annotations

from collections.abc import Sequence

from alpa_meta.compat import JaxprEqn, Var, shape_of
from alpa_meta.operators.regions import is_region
from alpa_meta.token_slices.cuts import Cutting
from alpa_meta.token_slices.moves import moved_dim
from alpa_meta.token_slices.places import ROW, Layout, Place, Slices, whole
from alpa_meta.token_slices.reading import UnreadableError, reading_of
from alpa_meta.token_slices.values import Value

_ROWS: Layout = (Place(ROW),)


def input_value(var: Var, holds_tokens: bool, slices: Slices) -> Value:
    """Return what is known of an input of the program."""
    rank = len(shape_of(var))
    if not holds_tokens:
        return Value("known", whole(rank))
    sizes = shape_of(var)
    for dim in range(1, rank):
        if sizes[dim] == slices.tokens:
            layout = (None,) * dim + _ROWS + (None,) * (rank - dim - 1)
            return Value("known", layout, of_batch=True)
        if sizes[dim] == slices.tokens + 1:
            return Value("known", whole(rank), of_batch=True, longer=dim)
    return Value("known", whole(rank), of_batch=True)


def token_hints(eqn: JaxprEqn, operands: Sequence[Value], slices: Slices) -> list[Layout] | None:
    """Return where the tokens lie in the results of an equation on the batch alone, if known."""
    for value in operands:
        if value.longer is not None and _cut_to(eqn, value.longer, slices.tokens):
            rank = len(value.layout)
            return [(None,) * value.longer + _ROWS + (None,) * (rank - value.longer - 1)]
    if is_region(eqn) or not any(any(value.layout) for value in operands):
        return None
    layouts = [value.layout for value in operands]
    dim = moved_dim(eqn, layouts)
    if dim is not None:
        sizes = [shape_of(var) for var in eqn.outvars]
        kept = all(size[dim] == slices.tokens for size in sizes)
        rows = ((None,) * dim + _ROWS + (None,) * (len(size) - dim - 1) for size in sizes)
        return list(rows) if kept else None
    try:
        reading = reading_of(eqn, layouts, Cutting(slices, True), _no_choice)
    except UnreadableError:
        return None
    return None if reading.combined else list(reading.results)


def longer_dim(
    eqn: JaxprEqn, operands: Sequence[Value], layouts: list[Layout] | None
) -> int | None:
    """Return the dim of one token more, where an operator keeps it."""
    same = [value.longer for value in operands if value.longer is not None]
    shapes = {shape_of(atom) for atom in (*eqn.invars, *eqn.outvars) if shape_of(atom)}
    return same[0] if same and layouts is None and len(shapes) == 1 else None


def _no_choice(_: Sequence[str]) -> str:
    raise UnreadableError("meets tokens twice")


def _cut_to(eqn: JaxprEqn, dim: int, tokens: int) -> bool:
    """Return whether the result of `eqn` is its operand with one of `tokens` + 1 elements of a dim
    left out, as the inputs and the targets of a row of tokens are."""
    if len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return False
    before, after = list(shape_of(eqn.invars[0])), list(shape_of(eqn.outvars[0]))
    if before[dim : dim + 1] != [tokens + 1]:
        return False
    before[dim] = tokens
    return before == after
