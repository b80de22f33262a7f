"""The walk over a stage's equations that fills its selection problem (see `selection`).

What an equation is given is elsewhere: its choices (`operator_choice`), an operand to follow
(`light_equations`), its cost (`operator_seconds`), the completion of its sums (`partial_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
from attrs import evolve

from alpa_interchange import ShardingSpec, Strategy
from alpa_meta.compat import Atom, JaxprEqn, Var, is_drop, shape_of
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.intra_op.bucketed_traffic import (
    BucketedTraffic,
    Sent,
    own_sums,
)
from alpa_meta.intra_op.coarse_solution import LARGE, Classes, classes_of, equal_axes
from alpa_meta.intra_op.converted_copies import ConvertedCopies
from alpa_meta.intra_op.equation_facts import facts_of
from alpa_meta.intra_op.equation_seconds import Edge, EquationSeconds, Priced
from alpa_meta.intra_op.liveness import KINDS, Timeline
from alpa_meta.intra_op.mesh_costs import Conversion, MeshCosts
from alpa_meta.intra_op.operator_choice import OperatorChoice, operator_choice
from alpa_meta.intra_op.other_sizes import others_of
from alpa_meta.intra_op.partial_sums import completions
from alpa_meta.intra_op.placed_equations import Placed, placed_equations
from alpa_meta.intra_op.program_borders import borders, end_program
from alpa_meta.intra_op.regions import barrier_record, region_record
from alpa_meta.intra_op.sent_seconds import SentSeconds
from alpa_meta.intra_op.stage_problem import Record, Source, StageEqns
from alpa_meta.intra_op.stage_spans import StageSpans
from alpa_meta.operators.elementwise import is_barrier
from alpa_meta.pinning import Pin
from alpa_meta.types import Floats, Ints
from ilp_sharding.strategies import ProblemBuilder


class Builder:
    """Walks equations and fills a `ProblemBuilder`; `others` are the same ones at other sizes."""

    def __init__(
        self, costs: MeshCosts, stage: StageEqns, others: tuple[StageEqns, ...] = ()
    ) -> None:
        self.costs = costs
        self.stage = stage
        self.others = others_of(stage, others)
        self.places = placed_equations(stage, self.others, costs.platform, costs.attends)
        self._ratios = [other.num_microbatches / stage.num_microbatches for other in others]
        self.problem = ProblemBuilder()
        self.sources: dict[Atom, Source] = {}
        self._eqn_costs: list[tuple[int, int, Priced]] = []
        self._eqn_edges: list[Edge] = []
        self._home: dict[Source, int] = {}  # the equation that makes a value
        self._position = 0
        self.partial = self.places.partial
        self.order: dict[Var, int] = {}
        self.spread: set[Var] = set()
        self.operators: dict[Hashable, OperatorChoice] = {}
        self.seconds: dict[Hashable, Priced] = {}  # of operators alike
        self.following: dict[Hashable, tuple[Strategy, ...]] = {}  # of operators alike
        self._matrices: dict[Hashable, Priced] = {}
        self.state_nodes: set[int] = set()
        self.fixed = self.problem.node("fixed", "fixed", ["replicated"])
        self._choices: dict[int, tuple[ShardingSpec, ...] | tuple[Strategy, ...]] = {}
        self._constants: list[tuple[Source, int, int]] = []  # with their kind and count
        # What other microbatches keep too, those in flight or those delayed; and the count.
        self._of_others: list[tuple[Source, str, int]] = []
        self.timeline = Timeline(bool(stage.kept), costs.platform == "cpu", stage.is_whole_step)
        self._copies = ConvertedCopies(costs.layouts, stage, self.timeline)
        self.times: list[int] = []  # at which each equation begins
        self.copied = self._copied()
        self.late = self.places.late
        self.put_off = frozenset[Var]()  # to the end of a loop's trip
        self._keeps_order = any(map(is_barrier, stage.eqns))  # XLA puts nothing off past these
        self._phase = "forward"
        self.traffic = BucketedTraffic(costs)
        self.sent = SentSeconds(costs)
        self._times = 1  # that the equation walked over counts (`Window`)
        self._read_times: dict[Source, int] = {}  # and its reads

    def eqns(self) -> list[Record]:
        """Return the records of the stage's equations, walked over in order."""
        stage = self.stage
        defined, programs = stage.defined, borders(stage)
        records = []
        for position, (eqn, phase, key) in enumerate(
            zip(stage.eqns, stage.phases, stage.keys, strict=True)
        ):
            self._position, self._phase = position, phase
            self._count(position)
            self.times.append(self.timeline.now + 1)
            weight = 1.0 if phase == "update" else float(stage.num_microbatches)
            shape = facts_of(eqn)
            for number, var in zip(shape.read_at, shape.reads, strict=True):
                if var not in self.sources and var not in defined:
                    input_key = None if key is None else ("input", key, number)
                    self._input(var, input_key)
            if position in stage.reads:
                reads = stage.reads[position]
                self._read_times = {self.sources[var]: times for var, times in reads.items()}
            one = self.places.of[position]
            records.append(self.equation(eqn, key, weight, self.sources, phase, one))
            if position + 1 in programs:
                end_program(programs[position + 1], self.timeline, self.sources, self.times)
        self._phase = "update"
        for new, old in stage.carried:
            if new in self.sources and old in self.sources:
                source = self.sources[old]
                self._position = defined.get(new, 0)
                self._count(self._position)
                self.convert(self.sources[new], source.node, source.specs, 1.0)
                self.timeline.replace(self.sources[new], source)
        return records

    def _count(self, position: int) -> None:
        """Let what is added from here on count as often as the equation at `position`."""
        self._times = self.timeline.count = self.stage.times[position] if self.stage.times else 1
        self._read_times = {}

    def spans(self, num_strategies: Sequence[int]) -> StageSpans:
        """Return what the equations walked over hold, over time."""
        return StageSpans(
            self._constants,
            self._of_others,
            self.timeline.spans(),
            self._copies.made,
            self.costs.mesh,
            num_strategies,
            self.timeline.now + 1,
            len(self._ratios),
        )

    def _copied(self) -> frozenset[Var]:
        """Return the state that is copied before it is replaced."""
        copies = self.timeline.on_host and self.stage.is_whole_step
        return frozenset(old for _, old in self.stage.carried) if copies else frozenset()

    def _input(self, var: Var, key: Hashable | None) -> None:
        pinned = self.stage.pins.get(var)
        if pinned is not None and key is not None:
            key = (key, pinned)  # only inputs that are pinned alike share a node
        node, source = self.value_node(var, key or ("input", var), "input")
        self.sources[var] = source
        if var in self.stage.state:
            self.state_nodes.add(node)
            if var in self.stage.offloaded:
                self.timeline.store(source)
                moved = self.costs.host_seconds(source.bytes, source.specs)
                self._add_cost(node, Priced((moved,) * (1 + len(self._ratios))))
            else:
                self._constants.append((source, KINDS.index("state"), self._times))
                if var in self.copied and self._phase != "update":
                    self.timeline.store_copy(source)
        elif var in self.stage.received:
            self.timeline.store(source)
            if var in self.stage.returned:
                by = "returned"
            elif var in self.stage.read_once:
                by = "read once"
            else:
                by = "received late" if var in self.stage.read_late else "received"
            self._of_others.append((source, by, self._times))
            if var in self.stage.delayed:
                self._of_others.append((source, "delayed", self._times))
        if pinned is not None:
            self._pin(source, pinned)

    def _pin(self, source: Source, pinned: Pin) -> None:
        """Forbid the strategies under which a value is not as pinned."""
        if source.node is not None:
            allowed = [0.0 if pinned.allows(spec) else math.inf for spec in source.specs]
            self.problem.add_cost(source.node, np.array(allowed))

    def value_node(
        self, var: Var, key: Hashable, name: str, summed: bool = False
    ) -> tuple[int, Source]:
        """Return the node that chooses a value's spec, and the value's source; a value that is
        `summed` may also be an unreduced sum."""
        shape = shape_of(var)
        layouts = self.costs.layouts
        specs = layouts.summed_specs(shape) if summed else layouts.specs(shape)
        node = self.fixed if len(specs) == 1 else self.new_node(key, name, specs)
        other = tuple(map(tensor_bytes, self.others.values.get(var, ())))
        return node, Source(node, specs, shape, tensor_bytes(var), other)

    def new_node(
        self, key: Hashable, name: str, choices: tuple[ShardingSpec, ...] | tuple[Strategy, ...]
    ) -> int:
        """Return the node of `key`, which chooses one of these."""
        layouts, of = self.costs.layouts, self.costs.number(choices)
        node = self.problem.node(key, name, layouts.names(of), layouts.axis_bits(of))
        self._choices.setdefault(node, choices)
        return node

    def classes(self, num_entries: int) -> Classes | None:
        """Return classes of alike strategies, if a problem of so many edge entries needs them."""
        axes = equal_axes(self.costs.mesh)
        if axes is None or num_entries <= LARGE:
            return None
        found: dict[tuple[ShardingSpec, ...] | tuple[Strategy, ...], Ints] = {}
        classes = [np.zeros(1, dtype=np.int64)]  # of the fixed node
        for node in range(1, len(self._choices) + 1):
            choices = self._choices[node]
            if choices not in found:
                found[choices] = classes_of(choices, axes)
            classes.append(found[choices])
        return classes

    def end_loop(self, began: int, read: Sequence[Source]) -> None:
        """Note that what a loop reads, and what was converted for it, lived until its end."""
        self.timeline.hold_for_loop(read, began)
        self._copies.end_loop(began)

    def equation(
        self,
        eqn: JaxprEqn,
        key: Hashable | None,
        weight: float,
        scope: dict[Atom, Source],
        phase: str,
        one: Placed | None,
    ) -> Record:
        """Return the record of an equation that runs `weight` times a step, `one` operator; None: a
        region or a barrier. Its results are added to `scope`."""
        key = key if key is not None else ("eqn", eqn)
        self.timeline.advance(phase)
        shape = facts_of(eqn)
        if shape.region:
            record = region_record(self, eqn, key, weight, scope, phase)
        elif one is None:
            record = barrier_record(self, eqn, scope)
        else:
            record = self.operator(one, scope)
            read = self._read(shape.reads, scope, phase)
            late = scope is self.sources and not self._keeps_order and not one.waited_for
            self.timeline.compute(
                one.operator.liveness,
                read,
                record.results,
                reads_zero=shape.zero,
                dear=one.operator.dear,
                apart=one.operator.apart,
                late=late,
                ends_trip=bool(self.put_off) and self.put_off.issuperset(eqn.outvars),
                permutation=shape.permutation,
                matrices=shape.on_host if self.timeline.on_host else shape.matrices,
            )
        if self._copies.of_shared_reads:
            self._copies.hold_read(shape.reads)
        for var, source in zip(eqn.outvars, record.results, strict=True):
            if is_drop(var):
                continue
            scope[var] = source
            self.order[var] = len(self.order)
            if scope is not self.sources:
                continue
            self._home[source] = self._position
            if var in self.stage.marked:
                self._mark(var, source)
        return record

    def _mark(self, var: Var, source: Source) -> None:
        """Note what is asked of a result beside its readers."""
        stage = self.stage
        if var in stage.pins:
            self._pin(source, stage.pins[var])
        if var in stage.kept:
            self.timeline.hold([source])
            by = "kept late" if var in stage.read_late else "kept"
            self._of_others.append((source, by, self._times))
        if var in stage.delayed:
            self.timeline.hold([source])
            self._of_others.append((source, "delayed", self._times))
        if var in stage.accumulated and stage.num_microbatches > 1:
            size = max(source.bytes, 4.0 * math.prod(source.shape))
            widened = source.times(size / max(source.bytes, 1.0))
            self._constants.append((widened, KINDS.index("gradients"), self._times))

    def _read(self, reads: Sequence[Var], scope: Mapping[Atom, Source], phase: str) -> list[Source]:
        """Return the values that an equation reads; the update reads accumulators instead."""
        if phase == "update" and self.stage.num_microbatches > 1:
            reads = [var for var in reads if var not in self.stage.accumulated]
        return [scope[var] for var in reads if var in scope]

    def operator(self, one: Placed, scope: dict[Atom, Source]) -> Record:
        """Return the record of an operator: its node, its operands converted."""
        found = operator_choice(self, one, scope)
        eqn, leader, node, strategies = one.eqn, found.leader, found.node, found.strategies
        if leader is not None:
            followed = eqn.invars[leader]
            if followed in self.spread:
                self.spread.update(eqn.outvars)
            else:
                least = scope[followed].bytes
                for var, (_, size, _) in zip(eqn.outvars, one.results, strict=True):
                    if size > least:
                        self.spread.add(var)
        if one.late and one.sums:
            self._note_sums(one, node, strategies)
        self._add_cost(node, found.seconds)
        if found.sends:
            self.sent.operator(self._position, node, strategies, found.sends, found.seconds)
        num_copies, wanted = len(self._copies.made), found.columns.operands
        for number, var in zip(one.facts.read_at, one.facts.reads, strict=True):
            if var in scope:
                self.convert(scope[var], node, wanted[number], one.weight, var in self.late)
        if one.shared_read:
            self._copies.note_shared_read(eqn.outvars[0], num_copies)
        outputs = tuple(
            [
                Source(node, specs, *own)
                for specs, own in zip(found.columns.results, one.results, strict=True)
            ]
        )
        if leader is None and len(outputs) == 1 and found.partial:
            self.timeline.store(outputs[0])  # beside its sum, for as long as it takes
            key = one.key, "sum"
            completed = self.completed(eqn.outvars[0], outputs[0], key, one.weight)
            return Record(node, strategies, (), (completed,), completed=completed)
        return Record(node, strategies, (), outputs)

    @property
    def updates(self) -> bool:
        """Whether the equation walked over is of the update, which runs once a step."""
        return self._phase == "update"

    def weights(self, weight: float) -> list[float]:
        """Return how often what runs `weight` times a step runs at the other sizes."""
        return [weight if self.updates else weight * one for one in self._ratios]

    def completed(self, var: Var, natural: Source, key: Hashable, weight: float) -> Source:
        """Return the source of a result, `var`, after its partial sums were completed."""
        allowed = var in self.partial
        late = self._phase == "update" or var in self.late
        found = completions(self.costs, natural, allowed, late)
        node, finals = self.new_node((key, allowed), "sum", found.finals), found.finals
        if late:
            self.traffic.sums(self._phase, weight, natural, node, finals, self._times)
            assert natural.node is not None

            def priced(costs: MeshCosts) -> Floats:
                return completions(costs, natural, allowed, late).seconds[0]

            self.traffic.surcharge(
                self._phase,
                weight,
                natural.node,
                node,
                found,
                found.seconds[0],
                priced,
                self._times,
            )
        weighted = zip(found.seconds, [weight, *self.weights(weight)], strict=True)
        seconds = Priced(tuple([matrix * times for matrix, times in weighted]))
        self.sent.completion(self._position, natural, node, finals, late, seconds)
        self._add_edge(natural.node, node, seconds, self._times, self._position)
        return evolve(natural, node=node, specs=finals)

    def hold_completion(self, natural: Source, completed: Source) -> None:
        """Count sums that leave a region beside what they are completed from, while they are."""
        self.timeline.hold([natural])
        assert natural.node is not None and completed.node is not None
        mesh = self.costs.mesh
        parts = [mesh.size(tuple(a for dim in s.dims for a in dim)) for s in completed.specs]
        sends = [[before != after for after in completed.specs] for before in natural.specs]
        copied = np.array(sends) * (natural.bytes / np.array(parts))
        self._copies.add(natural, completed.node, copied)

    def _note_sums(self, one: Placed, node: int, strategies: Sequence[Strategy]) -> None:
        """Note the sums that an operator completes itself, which travel in buckets."""
        eqn, rule = one.eqn, one.rule
        mesh = self.costs.mesh  # not the builder, which would live as long as what it built
        assert rule is not None

        def sent(chosen: int, _: int) -> Iterator[Sent]:
            return own_sums(eqn, rule, strategies[chosen], mesh)

        size = sum([size for _, size, _ in one.results])
        self.traffic.add(self._phase, one.weight, size, (node, node), sent, self._times)

    def convert(
        self,
        source: Source,
        node: int | None,
        wanted: tuple[ShardingSpec, ...],
        weight: float,
        late: bool = False,
    ) -> None:
        """Add the cost of converting a value from its producer's specs to those wanted by `node`.

        `late` values, state, and all values in the update travel in buckets.
        """
        if source.node in (None, self.fixed) or node is None or not source.shape:
            return
        if source.node == node and source.specs is wanted:
            return  # as it is, whatever the choice
        in_buckets = late or self._phase == "update" or source.node in self.state_nodes
        found = self.costs.conversion(
            source.shape, source.bytes, source.specs, wanted, in_buckets, source.node == node
        )
        if found.seconds is not None:
            times = self._read_times.get(source, self._times)
            priced = self._weighted(found, source, wanted, weight, in_buckets)
            home = self._home.get(source, self._position)
            self.sent.conversion(self._position, source, node, wanted, in_buckets, priced)
            self._add_edge(source.node, node, priced, times, home)
            if in_buckets:
                self._note_conversion(source, node, wanted, weight, found, times)
        if found.copied is not None:
            self._copies.add(source, node, found.copied, wanted)

    def _weighted(
        self,
        found: Conversion,
        source: Source,
        wanted: tuple[ShardingSpec, ...],
        weight: float,
        in_buckets: bool,
    ) -> Priced:
        """Return the seconds per step of a conversion, remembered."""
        assert found.seconds is not None
        key = (found, weight, source.other_bytes, self._phase == "update")
        known = self._matrices.get(key)
        if known is None:
            matrices = [weight * found.seconds]
            for size, times in zip(source.other_bytes, self.weights(weight), strict=True):
                priced = self.costs.conversion_seconds(
                    source.shape, size, source.specs, wanted, in_buckets
                )
                matrices.append(times * priced)
            known = self._matrices[key] = Priced(tuple(matrices))
        return known

    def _note_conversion(
        self,
        source: Source,
        node: int,
        wanted: tuple[ShardingSpec, ...],
        weight: float,
        found: Conversion,
        times: int,
    ) -> None:
        """Note a conversion that travels in buckets, and what it costs in others."""
        assert source.node is not None and found.seconds is not None
        self.traffic.conversion(self._phase, weight, source, node, wanted, times)

        def priced(costs: MeshCosts) -> Floats:
            return costs.conversion_seconds(
                source.shape, source.bytes, source.specs, wanted, in_buckets=True
            )

        self.traffic.surcharge(
            self._phase, weight, source.node, node, found, found.seconds, priced, times
        )

    def _add_edge(
        self, first: int | None, second: int, priced: Priced, times: int, home: int
    ) -> None:
        assert first is not None
        self.problem.add_edge(first, second, priced.at[0] if times == 1 else times * priced.at[0])
        self._eqn_edges.append(Edge(self._position, home, first, second, times, priced))

    def _add_cost(self, node: int, priced: Priced) -> None:
        own = priced.at[0]
        self.problem.add_cost(node, own if self._times == 1 else self._times * own)
        self._eqn_costs.append((self._position, node, priced))

    def equation_seconds(self, count: int) -> EquationSeconds:
        """Return the seconds of the `count` equations walked over, under any choice."""
        priced, bits = (self._eqn_costs, self._eqn_edges), self.problem.axis_bits()
        return EquationSeconds(count, 1 + len(self._ratios), *priced, bits)
