"""Which values of a program have one entry per example of the batch.

The phases of a step are told apart by it, and a step that is not cut needs no more: the batch is
followed through the factors of the sharding rules from its inputs to where it is summed away,
whatever an operator does with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from alpa_meta.compat import ClosedJaxpr, JaxprEqn, Literal, Var, is_drop, open_jaxpr, scan_counts
from alpa_meta.microbatch.placement import Placement, batch_run, moving_blocks, placed
from alpa_meta.operators import sharding_rule
from alpa_meta.operators.regions import bodies, fold

Splits = Sequence[Placement | None]


def example_dims(jaxpr: ClosedJaxpr, inputs: Splits) -> dict[Var, Placement]:
    """Return {variable: where its entries belong to different examples}.

    `inputs` are the splits of the inputs, None for inputs that hold no examples.
    """
    known: dict[Var, Placement] = {}
    _follow(jaxpr, inputs, known)
    return known


def _follow(jaxpr: ClosedJaxpr, inputs: Splits, known: dict[Var, Placement]) -> Splits:
    flat = open_jaxpr(jaxpr)
    _note(known, flat.invars, inputs)
    for eqn in flat.eqns:
        operands = [_read(atom, known) for atom in eqn.invars]
        if any(split is not None for split in operands):
            _note(known, eqn.outvars, _results(eqn, operands, known))
    return [_read(atom, known) for atom in flat.outvars]


def _note(known: dict[Var, Placement], variables: Sequence[Var], splits: Splits) -> None:
    for var, split in zip(variables, splits, strict=True):
        if split is not None and not is_drop(var):
            known[var] = split


def _read(atom: Var | Literal, known: Mapping[Var, Placement]) -> Placement | None:
    return None if isinstance(atom, Literal) else known.get(atom)


def _results(eqn: JaxprEqn, operands: Splits, known: dict[Var, Placement]) -> Splits:
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
    inner: Sequence[ClosedJaxpr], operands: Splits, known: dict[Var, Placement]
) -> Splits:
    results = [_follow(body, operands[1:], known) for body in inner]
    return [_either(splits) for splits in zip(*results, strict=True)]


def _operator(eqn: JaxprEqn, operands: Splits) -> Splits:
    moved = moving_blocks(eqn, operands)
    if moved is not None:
        return moved.results
    rule = sharding_rule(eqn)
    if rule is None:
        return [None] * len(eqn.outvars)
    runs = [
        batch_run(rule, dims[split.dim], split.outer, 1)
        for split, dims in zip(operands, rule.operands, strict=True)
        if split is not None
    ]
    return [
        _either([placed(rule, dims, run, None) for run in runs if run is not None])
        for dims in rule.results
    ]


def _scan(
    eqn: JaxprEqn, body: ClosedJaxpr, operands: Splits, known: dict[Var, Placement]
) -> Splits:
    num_consts, num_carry, _ = scan_counts(eqn)
    scanned = num_consts + num_carry
    inside = [*operands[:scanned], *(_shifted(split, -1) for split in operands[scanned:])]
    results = _follow(body, inside, known)
    carry = [_either(pair) for pair in zip(inside[num_consts:scanned], results, strict=False)]
    if carry != inside[num_consts:scanned]:
        inside[num_consts:scanned] = carry
        results = _follow(body, inside, known)
    of_each = any(split is not None and split.dim == 0 for split in operands[scanned:])
    seen = [
        Placement("split", 0) if of_each else _shifted(split, +1) for split in results[num_carry:]
    ]
    return [*results[:num_carry], *seen]


def _shifted(split: Placement | None, by: int) -> Placement | None:
    if split is None or split.dim + by < 0:
        return None
    return evolve(split, dim=split.dim + by)


def _either(splits: Splits) -> Placement | None:
    return next((split for split in splits if split is not None), None)
