"""Which values of a program have one entry per example of the batch, from one trace alone.

A step that is not cut into microbatches needs no more: the batch dim is followed through the
sharding rules from the batch inputs to where it is summed away. How values would grow with the
batch (`batch`) takes a second trace, which for a deep model costs more than all of planning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alpa_meta.compat import Literal, is_drop, open_jaxpr, scan_counts
from alpa_meta.operators import sharding_rule
from alpa_meta.operators.regions import bodies, fold


def example_dims(jaxpr: Any, inputs: Sequence[int | None]) -> dict[Any, int]:
    """Return {variable: dim along which its entries belong to different examples}.

    `inputs` are those dims of the inputs, None for inputs that hold no examples.
    """
    known: dict[Any, int] = {}
    _follow(jaxpr, inputs, known)
    return known


def _follow(jaxpr: Any, inputs: Sequence[int | None], known: dict[Any, int]) -> list[int | None]:
    flat = open_jaxpr(jaxpr)
    _note(known, flat.invars, inputs)
    for eqn in flat.eqns:
        operands = [_read(atom, known) for atom in eqn.invars]
        if any(dim is not None for dim in operands):
            _note(known, eqn.outvars, _results(eqn, operands, known))
    return [_read(atom, known) for atom in flat.outvars]


def _note(known: dict[Any, int], variables: Sequence[Any], dims: Sequence[int | None]) -> None:
    for var, dim in zip(variables, dims, strict=True):
        if dim is not None and not is_drop(var):
            known[var] = dim


def _read(atom: Any, known: Mapping[Any, int]) -> int | None:
    return None if isinstance(atom, Literal) else known.get(atom)


def _results(
    eqn: Any, operands: Sequence[int | None], known: dict[Any, int]
) -> Sequence[int | None]:
    inner = bodies(eqn)
    return fold(
        eqn,
        scan=lambda: _scan(eqn, inner[0], operands, known),
        loop=lambda: _follow(inner[1], operands[eqn.params["cond_nconsts"] :], known),
        branches=lambda: _branches(inner, operands, known),
        remat=lambda: _follow(inner[0], operands, known),
        operator=lambda: _operator(eqn, operands),
    )


def _branches(
    inner: Sequence[Any], operands: Sequence[int | None], known: dict[Any, int]
) -> Sequence[int | None]:
    results = [_follow(body, operands[1:], known) for body in inner]
    return [_either(dims) for dims in zip(*results, strict=True)]


def _operator(eqn: Any, operands: Sequence[int | None]) -> Sequence[int | None]:
    rule = sharding_rule(eqn)
    if rule is None:
        return [None] * len(eqn.outvars)
    factors = {
        dims[dim][0]
        for dim, dims in zip(operands, rule.operands, strict=True)
        if dim is not None and dims[dim]
    }
    return [
        _either([dim for dim, names in enumerate(dims) if names and names[0] in factors])
        for dims in rule.results
    ]


def _scan(
    eqn: Any, body: Any, operands: Sequence[int | None], known: dict[Any, int]
) -> Sequence[int | None]:
    num_consts, num_carry, _ = scan_counts(eqn)
    scanned = num_consts + num_carry
    inside = [*operands[:scanned], *(dim - 1 if dim else None for dim in operands[scanned:])]
    results = _follow(body, inside, known)
    carry = [_either(pair) for pair in zip(inside[num_consts:scanned], results, strict=False)]
    if carry != inside[num_consts:scanned]:
        inside[num_consts:scanned] = carry
        results = _follow(body, inside, known)
    return [
        *results[:num_carry],
        *(None if dim is None else dim + 1 for dim in results[num_carry:]),
    ]


def _either(dims: Sequence[int | None]) -> int | None:
    return next((dim for dim in dims if dim is not None), None)
