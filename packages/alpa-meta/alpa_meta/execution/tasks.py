"""From stages to tasks: the programs each mesh runs, and the values that pass between them.

Per stage: `start` zeroes the accumulators, `statistics` adds up the totals that microbatches read,
if any, `forward` and `backward` run once per microbatch (one task, `train`, where there is no
pipeline; `backward_input` and `backward_weight` where the schedule splits it), `update` runs once
per step, in levels where stages need each other's scalars, and `metrics` scales totals that only
the result reads.
Values leave the microbatches as `accumulation` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from attrs import evolve, field, frozen

from alpa_interchange import TaskGraph, TaskSpec
from alpa_interchange.schedule import TASK_PHASES
from alpa_meta.compat import ClosedJaxpr, JaxprEqn, Literal, Var, dtype_of, is_drop
from alpa_meta.execution.accumulation import Accumulation, accumulation_of, crossing_values
from alpa_meta.inter_op.staging import Staging
from alpa_meta.passes.added_equations import jaxpr_of
from alpa_meta.step.program import Program
from alpa_meta.token_slices.staged import slice_numbers
from alpa_meta.types import HostArray

TaskKey = tuple[str, int, int, int]
"""Kind, stage, level of the update, and token slice."""


def _place_of(key: TaskKey) -> tuple[int, int, int, int]:
    """Return where a task stands among all: the backward pass takes the slices in reverse."""
    kind, stage, level, place = key
    return TASK_PHASES.index(kind), level, stage, place if kind == "forward" else -place


@frozen(eq=False)
class Task:
    """One program of one mesh: its equations, operands and results, and their names.

    `follows[k]` is set for equations this module added: the value whose sharding they keep.
    """

    spec: TaskSpec
    eqns: tuple[JaxprEqn, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Var, ...]
    follows: Mapping[int, Var] = field(factory=dict)

    def closed(self, program: Program) -> ClosedJaxpr:
        """Return the task as a ClosedJaxpr; constants of the step are closed over."""
        jaxpr = program.jaxpr
        read = {a for eqn in self.eqns for a in eqn.invars if not isinstance(a, Literal)}
        pairs = [
            (var, value)
            for var, value in zip(jaxpr.constvars, program.closed.consts, strict=True)
            if var in read
        ]
        flat = jaxpr_of(
            jaxpr, [var for var, _ in pairs], self.invars, self.outvars, list(self.eqns)
        )
        return ClosedJaxpr(flat, [value for _, value in pairs])


@frozen(eq=False)
class Output:
    """Where one array of the step's result comes from: a buffer, an input, or a constant.

    `concatenate` is the dim along which per-microbatch parts are joined.
    """

    name: str | None = None
    input: int | None = None
    constant: HostArray | jax.Array | None = None
    concatenate: int | None = None


@frozen(eq=False)
class Tasks:
    """All tasks of a step, their graph for emission, and the names of inputs and outputs."""

    tasks: tuple[Task, ...]
    graph: TaskGraph
    names: Mapping[Var, str]
    outputs: tuple[Output, ...]
    carry: Mapping[str, str]
    accumulators: Mapping[Var, Var]  # value of the microbatches -> accumulator variable
    num_microbatches: int

    def output_names(self) -> tuple[list[str], dict[str, int]]:
        """Return the buffers that are results, and by name the dims along which values of which
        every microbatch makes a part are joined."""
        per_step = set(self.graph.per_step)
        joined = {
            output.name: output.concatenate
            for output in self.outputs
            if output.name is not None and output.concatenate is not None
        }
        single = [name for name in self.graph.outputs if name not in joined]
        return [name if name in per_step else f"{name}@0" for name in single], joined


def build_tasks(program: Program, staging: Staging, *, update_apart: bool = False) -> Tasks:
    """Return the tasks of `program` cut as `staging` says.

    With `update_apart`, the update is a task of its own also where one task could do it all.
    """
    return _TaskBuilder(program, staging, update_apart).build()


class _TaskBuilder:
    def __init__(self, program: Program, staging: Staging, update_apart: bool) -> None:
        self.update_apart = update_apart
        self.program = program
        self.staging = staging
        self.count = program.num_microbatches
        self.jaxpr = program.jaxpr
        self.names: dict[Var, str] = {
            var: leaf.path for var, leaf in zip(self.jaxpr.invars, program.inputs, strict=True)
        }
        self.constants = set(self.jaxpr.constvars)
        self.crossing = crossing_values(staging, program)
        self.accumulation = accumulation_of(program, self.crossing)
        self.accumulators = self.accumulation.accumulators
        self.totals = evolve(
            self.accumulation,
            accumulators={value: total for total, value in program.totals.items()},
        )
        self.value_of = {total: value for value, total in self.accumulators.items()}
        self.home = {
            var: stage
            for eqn, stage in zip(staging.eqns, staging.stages, strict=True)
            for var in eqn.outvars
        }

    def _name(self, var: Var) -> str:
        if var not in self.names:
            self.names[var] = f"v{len(self.names)}"
        return self.names[var]

    def _part_name(self, var: Var) -> str:
        """Return the name of a value between the tasks of a microbatch: what they add up as well
        has a name of its own beside its sum's."""
        name = self._name(var)
        return f"{name} of a microbatch" if var in self.accumulators else name

    def build(self) -> Tasks:
        staging = self.staging
        single = staging.num_stages == 1
        together = "forward" if staging.forward_only else "backward"  # where there is no pipeline
        slices = slice_numbers(self.program, staging)
        groups: dict[TaskKey, list[int]] = {}
        for k, (phase, stage) in enumerate(zip(staging.phases, staging.stages, strict=True)):
            kind = phase
            if single and (phase != "update" or (self.count == 1 and not self.update_apart)):
                kind = together
            if phase == "backward" and not single and staging.by_weight is not None:
                kind = "backward_weight" if k in staging.by_weight else "backward_input"
            level = staging.levels[k] if kind == "update" else 0
            place = 0 if single or kind == "update" else slices[k]
            groups.setdefault((kind, stage, level, place), []).append(k)
        readers = self._readers(groups)
        tasks: list[Task] = []
        for key in sorted(groups, key=_place_of):
            tasks.append(self._task(key, groups[key], readers))
        tasks = [*self._start_tasks(), *self._statistics_tasks(), *tasks]
        return self._finish(tasks)

    def _readers(self, groups: Mapping[TaskKey, list[int]]) -> dict[Var, set[TaskKey]]:
        readers: dict[Var, set[TaskKey]] = {}
        for key, members in groups.items():
            for k in members:
                for atom in self.staging.eqns[k].invars:
                    if not isinstance(atom, Literal):
                        readers.setdefault(atom, set()).add(key)
        return readers

    def _task(
        self,
        key: TaskKey,
        members: Sequence[int],
        readers: Mapping[Var, set[TaskKey]],
    ) -> Task:
        kind, stage, level, place = key
        results = {a for a in self.jaxpr.outvars if not isinstance(a, Literal)}
        eqns: list[JaxprEqn] = []
        follows: dict[int, Var] = {}
        inputs: dict[Var, None] = {}
        outputs: dict[Var, None] = {}
        defined: set[Var] = set()

        def add(eqn: JaxprEqn, keeps: Var) -> None:
            follows[len(eqns)] = keeps
            eqns.append(eqn)
            defined.update(eqn.outvars)

        for k in members:
            eqn = self.staging.eqns[k]
            for atom in eqn.invars:
                if isinstance(atom, Literal) or atom in defined or atom in self.constants:
                    continue
                if kind == "update" and atom in self.accumulators:
                    inputs[self.accumulators[atom]] = None
                    for extra in self.accumulation.scaled(atom):
                        add(extra, atom)
                else:
                    inputs[atom] = None
            eqns.append(eqn)
            defined.update(var for var in eqn.outvars if not is_drop(var))
        produced = [v for k in members for v in self.staging.eqns[k].outvars if not is_drop(v)]
        in_place: list[tuple[Var, Var]] = []
        for var in produced:
            elsewhere = bool(readers.get(var, set()) - {key})
            if var in self.accumulators:
                accumulator = self.accumulators[var]
                inputs[accumulator] = None
                following = Var(accumulator.aval)
                for extra in self.accumulation.added(var, following):
                    add(extra, var)
                in_place.append((accumulator, following))
                inner = readers.get(var, set()) - {key}
                elsewhere = any(other[0] != "update" for other in inner)
                if elsewhere:
                    outputs[var] = None
            elif elsewhere or var in results:
                outputs[var] = None
        own = self._name if kind == "update" else self._part_name
        names_in = [self._input_name(var) if var in self.value_of else own(var) for var in inputs]
        names_out = [own(var) for var in outputs]
        accumulated = [self._input_name(a) for a, _ in in_place]
        spec = TaskSpec(
            name=f"{'train' if kind == 'backward' and self.staging.num_stages == 1 else kind}"
            f".{stage}"
            + (f".{level}" if kind == "update" and level else "")
            + (f".slice{place}" if place else ""),
            mesh=self.staging.mesh_of(stage),
            stage=stage,
            phase=kind,
            slice_index=place,
            inputs=tuple(names_in),
            outputs=(*names_out, *accumulated),
            donated=tuple(accumulated),
        )
        return Task(
            spec,
            tuple(eqns),
            tuple(inputs),
            (*outputs, *(following for _, following in in_place)),
            follows,
        )

    def _input_name(self, var: Var) -> str:
        if var in self.value_of:
            return f"sum of {self._name(self.value_of[var])}"
        return self._name(var)

    def _start_tasks(self) -> list[Task]:
        starts = []
        by_stage: dict[int, list[tuple[Var, Accumulation, Var]]] = {}
        for var in self.accumulators:
            by_stage.setdefault(self.home[var], []).append((var, self.accumulation, var))
        for total, var in self.program.totals.items():
            by_stage.setdefault(self.home[var], []).append((var, self.totals, total))
        for stage, values in sorted(by_stage.items()):
            eqns: list[JaxprEqn] = []
            follows: dict[int, Var] = {}
            zeros = []
            for var, accumulation, like in values:
                zero = Var(accumulation.accumulators[var].aval)
                for extra in accumulation.first(var, zero):
                    follows[len(eqns)] = like
                    eqns.append(extra)
                zeros.append(zero)
            spec = TaskSpec(
                name=f"start.{stage}",
                mesh=self.staging.mesh_of(stage),
                stage=stage,
                phase="start",
                inputs=(),
                outputs=tuple(self._input_name(a.accumulators[v]) for v, a, _ in values),
            )
            starts.append(Task(spec, tuple(eqns), (), tuple(zeros), follows))
        return starts

    def _statistics_tasks(self) -> list[Task]:
        """Return the forward passes that add up the totals, stage by stage: of each microbatch what
        the totals depend on, before any microbatch reads them.
        """
        total_of = {value: total for total, value in self.program.totals.items()}
        needed = self._ancestors(total_of)
        tasks = []
        for stage in sorted({self.staging.stages[k] for k in needed}):
            members = [k for k in needed if self.staging.stages[k] == stage]
            eqns = [self.staging.eqns[k] for k in members]
            made = {var for eqn in eqns for var in eqn.outvars if not is_drop(var)}
            read = {
                atom: None
                for eqn in eqns
                for atom in eqn.invars
                if not isinstance(atom, Literal) and atom not in made | self.constants
            }
            elsewhere = {
                atom
                for k in needed
                if self.staging.stages[k] != stage
                for atom in self.staging.eqns[k].invars
                if not isinstance(atom, Literal)
            }
            sent = [var for eqn in eqns for var in eqn.outvars if var in made & elsewhere]
            added, following, follows = [], [], {}
            for value in (var for eqn in eqns[:] for var in eqn.outvars if var in total_of):
                result = Var(total_of[value].aval)
                for extra in self.totals.added(value, result):
                    follows[len(eqns)] = total_of[value]
                    eqns.append(extra)
                added.append(total_of[value])
                following.append(result)
            names = [self._name(total) for total in added]
            spec = TaskSpec(
                name=f"statistics.{stage}",
                mesh=self.staging.mesh_of(stage),
                stage=stage,
                phase="statistics",
                inputs=(*map(self._statistic_name, read), *names),
                outputs=(*map(self._statistic_name, sent), *names),
                donated=tuple(names),
            )
            invars, outvars = (*read, *added), (*sent, *following)
            tasks.append(Task(spec, tuple(eqns), invars, outvars, follows))
        return tasks

    def _statistic_name(self, var: Var) -> str:
        """Return the name of a value between the tasks of the statistics, which the tasks after
        them make anew."""
        return self._name(var) if var not in self.home else f"{self._name(var)} for statistics"

    def _ancestors(self, values: Iterable[Var]) -> list[int]:
        """Return the positions of the equations of the microbatches that `values` depend on."""
        producer = {
            var: k
            for k, eqn in enumerate(self.staging.eqns)
            if self.staging.phases[k] != "update"
            for var in eqn.outvars
            if not is_drop(var)
        }
        pending, found = [producer[value] for value in values], set()
        while pending:
            k = pending.pop()
            if k not in found:
                found.add(k)
                read = [a for a in self.staging.eqns[k].invars if not isinstance(a, Literal)]
                pending += [producer[atom] for atom in read if atom in producer]
        return sorted(found)

    def _finish(self, tasks: Sequence[Task]) -> Tasks:
        program, jaxpr = self.program, self.jaxpr
        by_var = {var: k for k, var in enumerate(jaxpr.invars)}
        outputs: list[Output] = []
        carry: dict[str, str] = {}
        wanted: dict[str, None] = {}
        finals: list[Var] = []
        for atom, alias in zip(jaxpr.outvars, program.aliases, strict=True):
            if isinstance(atom, Literal):
                outputs.append(Output(constant=np.asarray(atom.val, dtype_of(atom))))
            elif atom in by_var:
                outputs.append(Output(input=by_var[atom]))
            elif atom in self.constants:
                value = program.closed.consts[list(jaxpr.constvars).index(atom)]
                outputs.append(Output(constant=value))
            elif atom in self.accumulation.joined:
                outputs.append(Output(self._name(atom), concatenate=self.accumulation.joined[atom]))
                wanted[self._name(atom)] = None
            else:
                if atom in self.accumulators:
                    finals.append(atom)
                outputs.append(Output(self._name(atom)))
                wanted[self._name(atom)] = None
            if alias is not None and outputs[-1].input != alias:
                source = outputs[-1]
                if source.name is not None:
                    carry[source.name] = program.inputs[alias].path
        tasks = self._with_finals(list(tasks), finals)
        returned = {program.inputs[o.input].path for o in outputs if o.input is not None}
        tasks = [self._with_donation(task, tasks, carry, returned) for task in tasks]
        per_step = self._per_step(tasks)
        read = {name for task in tasks for name in task.spec.inputs}
        homes = self._input_homes(tasks)
        inputs = [(name, home) for name, home in homes.items() if name in read]
        graph = TaskGraph(
            tasks=tuple(task.spec for task in tasks),
            per_step=tuple(per_step),
            inputs=tuple(name for name, _ in inputs),
            home=tuple(home for _, home in inputs),
            outputs=tuple(wanted),
        )
        return Tasks(
            tuple(tasks),
            graph,
            self.names,
            tuple(outputs),
            carry,
            self.accumulators,
            self.count,
        )

    def _with_finals(self, tasks: list[Task], finals: Sequence[Var]) -> list[Task]:
        """Add what turns accumulated results of the step (loss, metrics) into outputs.

        A value that an update task scales anyway is output there; the rest get a task of their own.
        """
        left: dict[int, list[Var]] = {}
        for var in dict.fromkeys(finals):
            left.setdefault(self.home[var], []).append(var)
        for stage, values in sorted(left.items()):
            eqns: list[JaxprEqn] = []
            follows: dict[int, Var] = {}
            results = []
            for var in values:
                fresh = Var(var.aval)
                for extra in self.accumulation.scaled(var):
                    renamed = [fresh if out is var else out for out in extra.outvars]
                    follows[len(eqns)] = var
                    eqns.append(extra.replace(outvars=renamed))
                results.append(fresh)
            spec = TaskSpec(
                name=f"metrics.{stage}",
                mesh=self.staging.mesh_of(stage),
                stage=stage,
                phase="update",
                inputs=tuple(self._input_name(self.accumulators[v]) for v in values),
                outputs=tuple(self._name(v) for v in values),
            )
            sources = tuple(self.accumulators[v] for v in values)
            tasks.append(Task(spec, tuple(eqns), sources, tuple(results), follows))
        return tasks

    def _with_donation(
        self, task: Task, tasks: Sequence[Task], carry: Mapping[str, str], returned: set[str]
    ) -> Task:
        """Let the task that writes new state overwrite the old, if it is the last to read it and
        the step does not return it.
        """
        replaced = {
            carry[name] for name in task.spec.outputs if carry.get(name) in task.spec.inputs
        }
        position = tasks.index(task)
        later = {name for other in tasks[position + 1 :] for name in other.spec.inputs}
        if task.spec.phase not in ("start", "update") and self.count > 1:
            replaced = set()
        donated = (*task.spec.donated, *sorted(replaced - later - returned))
        return evolve(task, spec=evolve(task.spec, donated=donated))

    def _per_step(self, tasks: Sequence[Task]) -> list[str]:
        batch = {leaf.path for leaf in self.program.inputs if leaf.in_parts}
        names: dict[str, None] = {
            leaf.path: None for leaf in self.program.inputs if not leaf.in_parts
        }
        if self.count == 1:
            late = [task for task in tasks if task.spec.phase == "update"]
            names.update((k, None) for task in late for k in task.spec.inputs if k in batch)
        for accumulator in self.accumulators.values():
            names[self._input_name(accumulator)] = None
        for task in tasks:
            if task.spec.phase in ("start", "update"):
                names.update((name, None) for name in task.spec.outputs if name not in batch)
            elif self.count == 1:
                crossing = {self._name(var) for var in self.crossing}
                state = [name for name in task.spec.outputs if name in crossing]
                single = self.staging.num_stages == 1
                updated = task.spec.outputs if single else ()
                names.update((name, None) for name in (*state, *updated))
        return list(names)

    def _input_homes(self, tasks: Sequence[Task]) -> dict[str, int]:
        """Return the mesh that holds each input: of the task that replaces it, else its first
        reader."""
        homes: dict[str, int] = {}
        alias_of = {
            self.program.inputs[alias].path: atom
            for atom, alias in zip(self.jaxpr.outvars, self.program.aliases, strict=True)
            if alias is not None and not isinstance(atom, Literal)
        }
        writers = {name: task.spec.mesh for task in tasks for name in task.spec.outputs}
        for leaf in self.program.inputs:
            if leaf.role == "total":
                continue  # the tasks of the statistics make it
            replacement = alias_of.get(leaf.path)
            name = self.names.get(replacement) if replacement is not None else None
            if name is not None and name in writers:
                homes[leaf.path] = writers[name]
                continue
            readers = [task.spec.mesh for task in tasks if leaf.path in task.spec.inputs]
            homes[leaf.path] = min(readers, default=0)
        return homes
