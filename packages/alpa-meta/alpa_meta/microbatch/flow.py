"""How every equation of a program runs in microbatches, loops and branches included.

`follow` walks a jaxpr in order, from the placements of its inputs to those of its outputs. A loop
has settled when a further trip keeps the placements of its carries; a carry that starts replicated
and comes back split is split from the start (its part is taken), one that comes back as a sum
starts as a sum (in the first microbatch).

A scan over the examples (`lax.map`, gradients that the user accumulates) makes the iterations of
the microbatch's own examples, where each stands alone: what its iterations hand on are sums that
they add to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import evolve, frozen

from alpa_meta.compat import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    is_drop,
    open_jaxpr,
    scan_counts,
)
from alpa_meta.microbatch.batched_while import each_example_alone
from alpa_meta.microbatch.placement import (
    OWN,
    REPLICATED,
    SUM,
    MixedError,
    Placement,
    Reading,
    operator_reading,
    split,
)
from alpa_meta.operators.regions import bodies, fold, is_region, is_scan
from alpa_meta.program_caches import cached_by_program

Atom = Var | Literal


@frozen(eq=False)
class Run:
    """How one equation runs in a microbatch, and the flows of the bodies it holds."""

    reading: Reading
    bodies: tuple[Flow, ...] = ()


@frozen(eq=False)
class Flow:
    """How a body runs in a microbatch: `outputs` are the placements that its results leave in."""

    body: ClosedJaxpr
    inputs: tuple[Placement, ...]
    runs: tuple[Run, ...]
    outputs: tuple[Placement, ...]


def literal_placement(atom: Literal) -> Placement:
    """Return the placement of a literal: replicated, and whether it is zero."""
    value = np.asarray(atom.val)
    return evolve(REPLICATED, zero=value.dtype != object and not np.any(value))


def read(atom: Atom, known: Mapping[Var, Placement]) -> Placement:
    """Return the placement of an operand; constants closed over are replicated."""
    return literal_placement(atom) if isinstance(atom, Literal) else known.get(atom, REPLICATED)


def run_of(eqn: JaxprEqn, operands: Sequence[Placement], num_microbatches: int) -> Run:
    """Return how an equation runs on operands of these placements; MixedError if it cannot."""
    if not is_region(eqn):
        return Run(operator_reading(eqn, operands, num_microbatches))
    if all(operand.kind == "replicated" for operand in operands):
        return Run(Reading(tuple(operands), (REPLICATED,) * len(eqn.outvars)))
    return _region(eqn, tuple(operands), num_microbatches)


@cached_by_program(1 << 10)  # every trip on which a loop settles asks for those inside
def _region(eqn: JaxprEqn, operands: tuple[Placement, ...], num_microbatches: int) -> Run:
    given = eqn, operands, num_microbatches
    return fold(
        eqn,
        scan=lambda: _scan(*given),
        loop=lambda: _while(*given),
        branches=lambda: _cond(*given),
        remat=lambda: _remat(*given),
    )


def _remat(eqn: JaxprEqn, operands: Sequence[Placement], num_microbatches: int) -> Run:
    (body,) = bodies(eqn)
    flow = _follow(body, operands, num_microbatches)
    return Run(Reading(tuple(operands), flow.outputs), (flow,))


def _follow(body: ClosedJaxpr, inputs: Sequence[Placement], num_microbatches: int) -> Flow:
    jaxpr = open_jaxpr(body)
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    runs = []
    for eqn in jaxpr.eqns:
        run = run_of(eqn, [read(atom, known) for atom in eqn.invars], num_microbatches)
        runs.append(run)
        known.update(
            (var, result)
            for var, result in zip(eqn.outvars, run.reading.results, strict=True)
            if not is_drop(var)
        )
    outputs = tuple(read(atom, known) for atom in jaxpr.outvars)
    return Flow(body, tuple(inputs), tuple(runs), outputs)


def _joined(eqn: JaxprEqn, placements: Sequence[Placement]) -> Placement:
    """Return the placement that values of all of these can be brought to; MixedError if none."""
    found = {evolve(one, zero=False) for one in placements if one.kind != "replicated"}
    kinds = {one.kind for one in placements}
    if len(found) > 1 or len(kinds) > 1 and "running" in kinds:
        raise MixedError(eqn)
    if found:
        return found.pop()
    return evolve(REPLICATED, zero=all(one.zero for one in placements))


def _settled(
    eqn: JaxprEqn, follow: Callable[[list[Placement]], Flow], carries: Sequence[Placement]
) -> Flow:
    """Return the flow of a loop's body, the carries of its inputs and outputs the same.

    `follow` returns the flow for given carries; its outputs begin with them.
    """
    carry = list(carries)
    while True:
        flow = follow(carry)
        after = flow.outputs[: len(carry)]
        joined = [_joined(eqn, pair) for pair in zip(carry, after, strict=True)]
        if joined == carry:
            return evolve(flow, outputs=(*joined, *flow.outputs[len(carry) :]))
        carry = joined


def _cond(eqn: JaxprEqn, operands: Sequence[Placement], num_microbatches: int) -> Run:
    predicate, *rest = operands
    if predicate.kind not in ("replicated", "own"):
        raise MixedError(eqn)
    flows = [_follow(body, rest, num_microbatches) for body in bodies(eqn)]
    results = tuple(
        _steered(_joined(eqn, outputs), predicate)
        for outputs in zip(*(flow.outputs for flow in flows), strict=True)
    )
    joined = tuple(evolve(flow, outputs=results) for flow in flows)
    return Run(Reading(tuple(operands), results), joined)


def _steered(result: Placement, by: Placement) -> Placement:
    """Return the placement of what a branch or the trips of a loop give that `by` decides."""
    return OWN if by.kind == "own" and result.kind == "replicated" else result


def _while(eqn: JaxprEqn, operands: Sequence[Placement], num_microbatches: int) -> Run:
    """Return how a loop runs whose microbatches make the same number of trips, or of which every
    example stands still once it has ended (`jax.vmap` of a loop).
    """
    num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    _refuse_running(eqn, operands[: num_test + num_body])
    test_consts, body_consts = operands[:num_test], operands[num_test : num_test + num_body]
    test, body = bodies(eqn)
    flow = _settled(
        eqn,
        lambda carry: _follow(body, [*body_consts, *carry], num_microbatches),
        operands[num_test + num_body :],
    )
    carry = flow.outputs
    proceeds = _follow(test, [*test_consts, *carry], num_microbatches)
    (going_on,) = proceeds.outputs
    if going_on.kind not in ("replicated", "own") and not each_example_alone(eqn, flow, proceeds):
        raise MixedError(eqn)
    results = tuple(_steered(one, going_on) for one in carry)
    return Run(Reading((*test_consts, *body_consts, *carry), results), (proceeds, flow))


def _scan(eqn: JaxprEqn, operands: Sequence[Placement], num_microbatches: int) -> Run:
    num_consts, num_carry, _ = scan_counts(eqn)
    consts, scanned = operands[:num_consts], operands[num_consts + num_carry :]
    if _along_examples(scanned):
        return _scan_of_examples(eqn, operands, num_microbatches)
    _refuse_running(eqn, (*consts, *scanned))
    (body,) = bodies(eqn)
    xs = [split(x.dim - 1, x.outer) if x.kind == "split" else x for x in scanned]
    flow = _settled(
        eqn,
        lambda carry: _follow(body, [*consts, *carry, *xs], num_microbatches),
        operands[num_consts : num_consts + num_carry],
    )
    carry = flow.outputs[:num_carry]
    ys = [split(y.dim + 1, y.outer) if y.kind == "split" else y for y in flow.outputs[num_carry:]]
    return Run(Reading((*consts, *carry, *scanned), (*carry, *ys)), (flow,))


def _along_examples(scanned: Sequence[Placement]) -> bool:
    return any(one.kind == "split" and one.dim == 0 for one in scanned)


def runs_over_examples(eqn: JaxprEqn, run: Run) -> bool:
    """Return whether an equation is a scan of which a microbatch makes a part of the iterations."""
    return is_scan(eqn) and _along_examples(run.reading.operands[sum(scan_counts(eqn)[:2]) :])


def _refuse_running(eqn: JaxprEqn, read_every_trip: Sequence[Placement]) -> None:
    """Raise MixedError where a loop would add a running sum as often as it makes trips."""
    if any(one.kind == "running" for one in read_every_trip):
        raise MixedError(eqn)


def _scan_of_examples(eqn: JaxprEqn, operands: Sequence[Placement], num_microbatches: int) -> Run:
    """Return how a scan over the examples runs: over those of the microbatch.

    What it hands on is a sum, or stays as it is, as the cotangent of a sum does.
    """
    num_consts, num_carry, num_scanned = scan_counts(eqn)
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    scanned = operands[num_consts + num_carry :]
    whole = all(one.kind == "replicated" for one in consts)
    added = all(one.kind in ("replicated", "sum") for one in carry)
    along = all(one.kind == "replicated" or one == split(0) for one in scanned)
    if not (whole and added and along) or eqn.params["length"] % num_microbatches:
        raise MixedError(eqn)
    (body,) = bodies(eqn)
    inner = open_jaxpr(body)
    pairs = zip(inner.invars[num_consts:], inner.outvars[:num_carry], strict=False)
    stays = [before is after for before, after in pairs]
    if any(one.kind == "sum" and kept for one, kept in zip(carry, stays, strict=True)):
        raise MixedError(eqn)
    handed_on = tuple(
        REPLICATED if kept else Placement("running", k) for k, kept in enumerate(stays)
    )
    flow = _follow(body, [*consts, *handed_on, *[OWN] * num_scanned], num_microbatches)
    seen = flow.outputs[num_carry:]
    if flow.outputs[:num_carry] != handed_on or any(one.kind == "running" for one in seen):
        raise MixedError(eqn)
    outside = tuple(REPLICATED if kept else SUM for kept in stays)
    reading = Reading(
        (*consts, *outside, *[split(0)] * num_scanned), (*outside, *[split(0)] * len(seen))
    )
    return Run(reading, (flow,))
