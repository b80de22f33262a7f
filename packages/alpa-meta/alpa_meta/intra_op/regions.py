"""Regions in a selection problem: loops, conditionals and recomputation share the outer problem.

A region's inputs are nodes of their own, converted once from outside; equations of its bodies count
as often as they run; a carry has one spec, and so have the results of all branches. Sums may leave
a scan or a recomputation unreduced: those of all trips are completed at once behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from alpa_interchange import ShardingSpec
from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    closed,
    is_drop,
    open_jaxpr,
    scan_counts,
    shape_of,
)
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.intra_op.bucketed_traffic import late_in_body
from alpa_meta.intra_op.partial_sums import may_leave_partial, summed_carries
from alpa_meta.intra_op.stage_problem import Body, Record, Source
from alpa_meta.operators import is_heavy
from alpa_meta.operators.regions import bodies, fold

if TYPE_CHECKING:
    from alpa_meta.intra_op.builder import Builder


def region_record(
    builder: Builder,
    eqn: JaxprEqn,
    key: Hashable,
    weight: float,
    scope: dict[Atom, Source],
    phase: str,
) -> Record:
    outer = [operand_source(atom, scope) for atom in eqn.invars]
    inner = bodies(eqn)
    return fold(
        eqn,
        scan=lambda: _scan(builder, eqn, inner[0], key, weight, outer, phase),
        loop=lambda: _while(builder, eqn, key, weight, outer, phase),
        branches=lambda: _cond(builder, eqn, inner, key, weight, outer, phase),
        remat=lambda: _remat(builder, eqn, inner[0], key, weight, outer, phase),
    )


def barrier_record(builder: Builder, eqn: JaxprEqn, scope: Mapping[Atom, Source]) -> Record:
    """Return the record of a barrier of several values: each as it comes, and in memory."""
    sources = tuple(operand_source(atom, scope) for atom in eqn.invars)
    builder.timeline.hold(sources)
    builder.timeline.compute_again()
    return Record(None, (), sources, sources, passes_on=True)


def _remat(
    builder: Builder,
    eqn: JaxprEqn,
    body: Jaxpr | ClosedJaxpr,
    key: Hashable,
    weight: float,
    outer: list[Source],
    phase: str,
) -> Record:
    leaving, late = (
        [number for number, var in enumerate(eqn.outvars) if var in found]
        for found in (builder.partial, builder.late)
    )
    builder.timeline.compute_again()
    put_off = [number for number, var in enumerate(eqn.outvars) if var in builder.put_off]
    inner = _body(builder, body, (key, "again"), weight, outer, phase, leaving, late, put_off)
    results = _completed(builder, eqn, inner.outputs, key, weight, phase)
    return Record(None, (), tuple(outer), results, (inner,))


def operand_source(atom: Atom, scope: Mapping[Atom, Source]) -> Source:
    if not isinstance(atom, Literal) and atom in scope:
        return scope[atom]
    rank = len(shape_of(atom))
    return Source(None, (ShardingSpec.replicated(rank),), shape_of(atom), tensor_bytes(atom))


def _entry(
    builder: Builder,
    var: Var,
    key: Hashable,
    outer: Source,
    weight: float,
    stacked: int | None = None,
    summed: bool = False,
) -> Source:
    """Return the source of a region's input, converted once from the value outside."""
    node, source = builder.value_node(var, key, "region input", summed)
    specs = source.stacked(stacked).specs if stacked is not None else source.specs
    builder.convert(outer, node, specs, weight)
    if outer.node is None:
        return source
    if stacked is None:
        builder.timeline.alias(source, outer)
    else:
        builder.timeline.store(source)
    return source


def _completed(
    builder: Builder,
    eqn: JaxprEqn,
    natural: Sequence[Source],
    key: Hashable,
    weight: float,
    phase: str,
) -> tuple[Source, ...]:
    """Return the sources of a region's results after sums that left its body were completed."""
    results = list(natural)
    for number, (var, source) in enumerate(zip(eqn.outvars, natural, strict=True)):
        if is_drop(var) or not any(spec.partial for spec in source.specs):
            continue
        done = builder.completed(var, source, (key, "sum", number), weight)
        builder.hold_completion(source, done)
        builder.timeline.advance(phase)
        builder.timeline.store(done)
        results[number] = done
    return tuple(results)


def _body(
    builder: Builder,
    body: Jaxpr | ClosedJaxpr,
    key: Hashable,
    weight: float,
    inputs: Sequence[Source],
    phase: str,
    leaving: Collection[int] = (),
    late: Collection[int] = (),
    put_off: Collection[int] = (),
) -> Body:
    """Return a region's body.

    The outputs numbered in `leaving` may be unreduced sums, nothing but the update waits for those
    in `late`, and nothing but the end of a loop's trip for those in `put_off`.
    """
    jaxpr = open_jaxpr(body)
    scope: dict[Atom, Source] = dict(zip(jaxpr.invars, inputs, strict=True))
    outside = builder.partial, builder.late, builder.put_off
    builder.partial = may_leave_partial(jaxpr, leaving)
    builder.late = late_in_body(jaxpr, late, phase, is_heavy)
    builder.put_off = late_in_body(jaxpr, put_off, phase, is_heavy) if put_off else frozenset()
    records = []
    for number, inner in enumerate(jaxpr.eqns):
        at = (key, number)
        one = builder.places.place(inner, at, weight, phase, builder.late, builder.partial)
        records.append(builder.equation(inner, at, weight, scope, phase, one))
    builder.partial, builder.late, builder.put_off = outside
    outputs = tuple(operand_source(atom, scope) for atom in jaxpr.outvars)
    return Body(body, tuple(inputs), outputs, tuple(records))


def _scan(
    builder: Builder,
    eqn: JaxprEqn,
    body: Jaxpr | ClosedJaxpr,
    key: Hashable,
    weight: float,
    outer: list[Source],
    phase: str,
) -> Record:
    num_consts, num_carry, _ = scan_counts(eqn)
    length = eqn.params["length"]
    jaxpr = open_jaxpr(body)
    inputs, operands, summed = [], [], summed_carries(eqn)
    for number, (var, source) in enumerate(zip(jaxpr.invars, outer, strict=True)):
        stacked = length if number >= num_consts + num_carry else None
        is_summed = number - num_consts in summed
        entry = _entry(builder, var, (key, "in", number), source, weight, stacked, is_summed)
        inputs.append(entry)
        operands.append(entry.stacked(length) if stacked is not None else entry)
    began = builder.timeline.now
    for carry in inputs[num_consts : num_consts + num_carry]:
        builder.timeline.store(carry)
    outer_body = builder.timeline.enter()
    ends = range(num_carry, len(eqn.outvars))
    leaving, trips = {*summed, *ends}, weight * length
    inner = _body(builder, body, (key, "body"), trips, inputs, phase, leaving, (), ends)
    builder.timeline.leave(outer_body)
    carries = inputs[num_consts : num_consts + num_carry]
    for carry, result in zip(carries, inner.outputs[:num_carry], strict=True):
        builder.convert(result, carry.node, carry.specs, trips)
    inner.outputs = (*carries, *inner.outputs[num_carry:])
    results = (*carries, *(source.stacked(length) for source in inner.outputs[num_carry:]))
    for result in results[num_carry:]:
        builder.timeline.store_zeros(result, began)
    builder.timeline.hold(inner.outputs)
    builder.end_loop(began, [*outer[:num_consts], *outer[num_consts + num_carry :]])
    results = _completed(builder, eqn, results, key, weight, phase)
    return Record(None, (), tuple(operands), results, (inner,))


def _while(
    builder: Builder, eqn: JaxprEqn, key: Hashable, weight: float, outer: list[Source], phase: str
) -> Record:
    params = eqn.params
    cond, body = closed(params["cond_jaxpr"]), closed(params["body_jaxpr"])
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    trips = weight * builder.costs.while_trips
    variables = [
        *open_jaxpr(cond).invars[:num_cond],
        *open_jaxpr(body).invars,
    ]
    entries = [
        _entry(builder, var, (key, "in", number), source, weight)
        for number, (var, source) in enumerate(zip(variables, outer, strict=True))
    ]
    carries = entries[num_cond + num_body :]
    began = builder.timeline.now
    for carry in carries:
        builder.timeline.store(carry)
    tested = _body(builder, cond, (key, "test"), trips, [*entries[:num_cond], *carries], phase)
    tested.outputs = (_whole(open_jaxpr(cond).outvars[0]),)
    outer_body = builder.timeline.enter()
    inner = _body(builder, body, (key, "body"), trips, entries[num_cond:], phase)
    builder.timeline.leave(outer_body)
    for carry, result in zip(carries, inner.outputs, strict=True):
        builder.convert(result, carry.node, carry.specs, trips)
    builder.timeline.hold(inner.outputs)
    inner.outputs = tuple(carries)
    builder.end_loop(began, outer[: num_cond + num_body])
    return Record(None, (), tuple(entries), tuple(carries), (tested, inner))


def _whole(atom: Atom) -> Source:
    rank = len(shape_of(atom))
    return Source(None, (ShardingSpec.replicated(rank),), shape_of(atom), tensor_bytes(atom))


def _cond(
    builder: Builder,
    eqn: JaxprEqn,
    branches: Sequence[Jaxpr | ClosedJaxpr],
    key: Hashable,
    weight: float,
    outer: list[Source],
    phase: str,
) -> Record:
    entries = [
        _entry(builder, var, (key, "in", number), source, weight)
        for number, (var, source) in enumerate(
            zip(open_jaxpr(branches[0]).invars, outer[1:], strict=True)
        )
    ]
    results = tuple(
        builder.value_node(var, (key, "out", number), "branch result")[1]
        for number, var in enumerate(eqn.outvars)
    )
    for result in results:
        builder.timeline.store(result)
    bodies = []
    for number, branch in enumerate(branches):
        body = _body(builder, branch, (key, "branch", number), weight, entries, phase)
        for result, produced in zip(results, body.outputs, strict=True):
            builder.convert(produced, result.node, result.specs, weight)
        body.outputs = results
        bodies.append(body)
    predicate = _whole(eqn.invars[0])
    return Record(None, (), (predicate, *entries), results, tuple(bodies))
