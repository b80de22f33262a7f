"""Intra-operator planning: the equations of a stage as one strategy-selection problem on one mesh.

Nodes: every heavy equation (its strategies come from its sharding rule), and every input, every
loop-carried value and every value that several read (`shared_reads`), whose strategies are all
sharding specs. A light equation (elementwise, layout) follows one operand (`light_equations`): it
shares that operand's node and takes the sharding it finds. Edges: what it costs to convert a value
from the spec its producer leaves it in to the one its reader wants. Costs are seconds per training
step:

    node   compute on one device's part + collectives inside the operator  -> operator_seconds
    edge   completion of the sums an operator leaves partial               -> partial_sums
    edge   cheapest conversion between the two specs                       -> Builder.convert()
    times  microbatches (forward, backward) or 1 (update), times loop trips

Equations at the same place of layers of the same class share one node (`ProblemBuilder`), and so
does the body of a scan, whose carry enters and leaves with one spec. Memory is a profile over the
order of the equations (`liveness`, `memory_profile`), of which the times that bind become rows of
the problem (`memory_limit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from alpa_interchange import ShardingProblem, ShardingSpec, Strategy
from alpa_meta.compat import Atom, shape_of
from alpa_meta.intra_op.bucketed_traffic import BucketedTraffic
from alpa_meta.intra_op.builder import Builder
from alpa_meta.intra_op.coarse_solution import Classes
from alpa_meta.intra_op.equation_seconds import EquationSeconds
from alpa_meta.intra_op.memory_profile import MemoryProfile
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.sent_seconds import SentSeconds
from alpa_meta.intra_op.stage_problem import Record, Source, StageEqns
from alpa_meta.intra_op.stage_spans import StageSpans
from alpa_meta.spmd import JaxprPlan, RegionPlan


@frozen(eq=False)
class Selection:
    """A selection problem together with what its nodes mean."""

    problem: ShardingProblem
    sources: Mapping[Atom, Source]
    records: Sequence[Record]
    stage: StageEqns
    costs: MeshCosts
    seconds: EquationSeconds
    traffic: BucketedTraffic
    sent: SentSeconds
    spans: StageSpans
    memory: MemoryProfile  # of the `spans`, with the stage's microbatches in flight
    times: Sequence[int]  # of the memory, at which each equation begins
    classes: Classes | None = None  # of strategies that differ by the use of equal axes only

    def spec(self, var: Atom, choice: Sequence[int]) -> ShardingSpec:
        """Return the sharding spec of `var` under a choice of strategies."""
        source = self.sources.get(var)
        if source is None or source.node is None:
            return ShardingSpec.replicated(len(shape_of(var)))
        return source.specs[choice[source.node]]

    def strategy(self, position: int, choice: Sequence[int]) -> Strategy | RegionPlan:
        """Return how equation `position` runs under a choice."""
        return _chosen(self.records[position], choice)


def build(
    stage: StageEqns, costs: MeshCosts, name: str, others: tuple[StageEqns, ...] = ()
) -> Selection:
    """Return the selection problem of a stage on a mesh.

    `others` are the same equations at other sizes, at which choices are priced too
    (`other_sizes`).
    """
    builder = Builder(costs, stage, others)
    records = builder.eqns()
    problem = builder.problem.build(name)
    spans = builder.spans(problem.num_strategies.tolist())
    return Selection(
        problem,
        builder.sources,
        records,
        stage,
        costs,
        builder.equation_seconds(len(records)),
        builder.traffic,
        builder.sent,
        spans,
        spans.profile(stage),
        tuple(builder.times),
        builder.classes(problem.edge_cost.size),
    )


def same_choice(here: Selection, choice: Sequence[int], there: Selection) -> tuple[int, ...] | None:
    """Return the choice of the same strategies, by name, in a problem like `here`: of a window, or
    at another size. None if a node or a strategy lacks.
    """
    before, after = here.problem, there.problem
    if before.node_names != after.node_names:
        return None
    found = []
    for node, chosen in enumerate(choice):
        mine, names = before.strategy_names[node], after.strategy_names[node]
        if mine == names:
            found.append(int(chosen))
        elif mine[chosen] in names:
            found.append(names.index(mine[chosen]))
        else:
            return None
    return tuple(found)


def _chosen(record: Record, choice: Sequence[int]) -> Strategy | RegionPlan:
    if record.passes_on:
        return Strategy(
            assignment=(),
            operands=tuple(_spec_of(source, choice) for source in record.operands),
            results=tuple(_spec_of(source, choice) for source in record.results),
        )
    if not record.bodies:
        strategy = record.strategies[choice[record.node] if record.node is not None else 0]
        if record.completed is not None:
            return evolve(strategy, results=(_spec_of(record.completed, choice),))
        return strategy
    bodies = []
    for body in record.bodies:
        inputs = tuple(_spec_of(source, choice) for source in body.inputs)
        outputs = tuple(_spec_of(source, choice) for source in body.outputs)
        strategies = tuple(_chosen(inner, choice) for inner in body.records)
        bodies.append(JaxprPlan(inputs, strategies, outputs))
    operands = tuple(_spec_of(source, choice) for source in record.operands)
    results = tuple(_spec_of(source, choice) for source in record.results)
    return RegionPlan(operands, results, tuple(bodies))


def _spec_of(source: Source, choice: Sequence[int]) -> ShardingSpec:
    return source.specs[choice[source.node] if source.node is not None else 0]
