"""How every operator of a stage runs: written into a plan by name, and found again in a program.

A plan does not say strategies by number. `stage_operators` writes each operator's factors, operand
and result specs under its name (`operator_names`); `restored_choice` takes the selection problem
that this version builds for the same stage and keeps, for every node, the strategies under which
all operators that share the node read and write what the plan says. The first that is left is
chosen. A version may therefore enumerate strategies in another order, let other operators follow,
or call factors otherwise; where it has no such strategy any more, the operator is named.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from alpa_interchange import OperatorSharding, ShardingSpec, StageSharding, Strategy
from alpa_meta.compat import Atom, JaxprEqn, open_jaxpr, source_line
from alpa_meta.errors import PlanError
from alpa_meta.intra_op.selection import Selection
from alpa_meta.intra_op.stage_problem import Record, Source
from alpa_meta.planning.operator_names import StageNames, names_in_body
from alpa_meta.spmd import RegionPlan
from alpa_meta.step.program import Program

Named = tuple[str, JaxprEqn, Record]


def stage_operators(
    selection: Selection, names: Sequence[str], choice: Sequence[int]
) -> tuple[OperatorSharding, ...]:
    """Return how the operators of a stage run, those of a primitive that run alike together."""
    found: dict[tuple[str, Strategy], list[str]] = {}
    sources: dict[tuple[str, Strategy], JaxprEqn] = {}
    for position, operator in enumerate(_operators(selection, names)):
        for name, eqn, strategy in _strategies(*operator, selection.strategy(position, choice)):
            kind = (eqn.primitive.name, strategy)
            found.setdefault(kind, []).append(name)
            sources.setdefault(kind, eqn)
    return tuple(
        OperatorSharding(
            names=tuple(members), strategy=kind[1], source=_short(source_line(sources[kind]))
        )
        for kind, members in found.items()
    )


def received_specs(
    selection: Selection, names: StageNames, choice: Sequence[int]
) -> dict[str, ShardingSpec]:
    """Return the spec of every value that a stage receives from others, and of every array that the
    step closes over, by name."""
    found = {}
    for var in selection.sources:
        if var in selection.stage.received:
            found[names.of_value[var]] = selection.spec(var, choice)
        elif var in names.of_constant:
            found[names.of_constant[var]] = selection.spec(var, choice)
    return found


def restored_choice(
    program: Program, names: StageNames, stage: int, selection: Selection, sharding: StageSharding
) -> tuple[int, ...]:
    """Return the strategy of every node under which the stage runs as the plan says.

    Raises PlanError, which names the operator or tensor, where there is none.
    """
    search = _Search(selection, stage)
    inputs = zip(program.jaxpr.invars, program.inputs, strict=True)
    tensors: dict[Atom, tuple[str, ShardingSpec | None]] = {
        var: (leaf.path, sharding.state_specs.get(leaf.path)) for var, leaf in inputs
    }
    received = {var: names.of_value[var] for var in selection.stage.received}
    for var, name in {**names.of_constant, **received}.items():
        tensors[var] = (name, sharding.received_specs.get(name))
    for value, source in selection.sources.items():
        if value in tensors:
            search.keep_spec(source, *tensors[value])
    planned = {name: group.strategy for group in sharding.operators for name in group.names}
    for operator in _operators(selection, names.of_stage(stage)):
        for name, _, record in _with_bodies(*operator):
            search.keep(name, record, planned.get(name))
    return search.choice()


class _Search:
    """The strategies of every node that agree with what the plan says."""

    def __init__(self, selection: Selection, stage: int) -> None:
        self._counts = [int(count) for count in selection.problem.num_strategies]
        self._stage = stage
        self._left: dict[int, NDArray[np.bool_]] = {}
        self._unsaid: dict[int, str] = {}
        self._agreeing: dict[Hashable, NDArray[np.bool_]] = {}

    def keep_spec(self, source: Source, name: str, spec: ShardingSpec | None) -> None:
        """Keep the strategies under which the value called `name` has the spec."""
        if source.node is None:
            return
        if spec is None:
            self._unsaid.setdefault(source.node, name)
            return
        key = (source.specs, spec)
        if key not in self._agreeing:
            self._agreeing[key] = np.array([one == spec for one in source.specs])
        self._keep(source.node, self._agreeing[key], name, f"sharded as {spec}")

    def keep(self, name: str, record: Record, wanted: Strategy | None) -> None:
        """Keep the strategies under which an operator runs as `wanted` (None: it is not said)."""
        sources = [*record.operands, *record.results] if record.node is None else []
        if record.completed is not None:
            sources.append(record.completed)
        if wanted is None:
            for node in [record.node, *(source.node for source in sources)]:
                if node is not None:
                    self._unsaid.setdefault(node, name)
            return
        if record.node is None:
            specs = [*wanted.operands, *wanted.results]
            if len(specs) != len(sources):
                raise self._unknown(name, f"with {len(specs)} operands and results")
            for source, spec in zip(sources, specs, strict=True):
                self.keep_spec(source, name, spec)
            return
        completed = record.completed is not None
        key = (record.strategies, wanted, completed)
        if key not in self._agreeing:
            self._agreeing[key] = _agreeing(record.strategies, wanted, completed)
        self._keep(record.node, self._agreeing[key], name, _described(wanted))
        for source in sources:
            self.keep_spec(source, name, wanted.results[0])

    def choice(self) -> tuple[int, ...]:
        """Return the first strategy left of every node."""
        chosen = []
        for node, count in enumerate(self._counts):
            if node in self._left:
                chosen.append(int(np.argmax(self._left[node])))
            elif count == 1:
                chosen.append(0)
            else:
                raise PlanError(
                    f"the plan does not say how {self._unsaid.get(node, 'a value')!r} of stage "
                    f"{self._stage} is sharded, which this version chooses by itself; plan again"
                )
        return tuple(chosen)

    def _keep(self, node: int, agreeing: NDArray[np.bool_], name: str, wanted: str) -> None:
        left = agreeing & self._left.get(node, np.True_)
        if not left.any():
            raise self._unknown(name, wanted)
        self._left[node] = left

    def _unknown(self, name: str, wanted: str) -> PlanError:
        return PlanError(
            f"{name!r} of stage {self._stage} is {wanted} by the plan, for which this version has "
            "no strategy that agrees with the operators around it; plan again"
        )


def _agreeing(
    strategies: Sequence[Strategy], wanted: Strategy, completed: bool
) -> NDArray[np.bool_]:
    """Return which strategies read and write what `wanted` does, of several those with its factors.

    What is `completed` behind the operator is not compared: its sums are partial here.
    """
    found = np.array(
        [
            one.operands == wanted.operands and (completed or one.results == wanted.results)
            for one in strategies
        ]
    )
    exact = found & np.array([one.assignment == wanted.assignment for one in strategies])
    return exact if exact.any() else found


def _operators(selection: Selection, names: Sequence[str]) -> Iterator[Named]:
    yield from zip(names, selection.stage.eqns, selection.records, strict=True)


def _with_bodies(name: str, eqn: JaxprEqn, record: Record) -> Iterator[Named]:
    """Yield an operator, and those in its bodies if it is a region."""
    yield name, eqn, record
    for number, body in enumerate(record.bodies):
        eqns = open_jaxpr(body.jaxpr).eqns
        inner = zip(names_in_body(name, number, eqns), eqns, body.records, strict=True)
        for member in inner:
            yield from _with_bodies(*member)


def _strategies(
    name: str, eqn: JaxprEqn, record: Record, plan: Strategy | RegionPlan
) -> Iterator[tuple[str, JaxprEqn, Strategy]]:
    """Yield how an operator runs, and those in its bodies if it is a region."""
    if isinstance(plan, Strategy):
        yield name, eqn, plan
        return
    yield name, eqn, Strategy(assignment=(), operands=plan.operands, results=plan.results)
    for number, (body, inner) in enumerate(zip(record.bodies, plan.bodies, strict=True)):
        eqns = open_jaxpr(body.jaxpr).eqns
        names = names_in_body(name, number, eqns)
        for member in zip(names, eqns, body.records, inner.strategies, strict=True):
            yield from _strategies(*member)


def _described(strategy: Strategy) -> str:
    operands = ", ".join(map(str, strategy.operands))
    return f"run as {strategy} ({operands} -> {', '.join(map(str, strategy.results))})"


def _short(source: str) -> str:
    """Return file:line without the folders, which are of one machine."""
    return source.replace("\\", "/").rpartition("/")[2]
