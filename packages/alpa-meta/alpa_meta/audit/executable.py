"""Audits a compiled pipeline: every task of every stage against its own plan."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Protocol

from attrs import evolve, frozen
from rich.console import Console, Group
from rich.text import Text

from alpa_interchange import LogicalMesh
from alpa_meta.audit.account import account
from alpa_meta.audit.hlo import compiled_collectives
from alpa_meta.audit.memory import MemoryCheck, task_memory
from alpa_meta.audit.numerics import NumericsCheck
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.audit.report import AuditReport, format_bytes

if TYPE_CHECKING:
    from alpa_meta.execution.compiled_task import CompiledTask
    from alpa_meta.planning.chosen_plan import Planned


class Auditable(Protocol):
    """What an executable tells its auditor; tasks are named, "forward_0" and so on."""

    def compiled_texts(self) -> Mapping[str, str]:
        """Return the compiled HLO text of each task."""

    def planned_collectives(self) -> Mapping[str, tuple[PlannedCollective, ...]]:
        """Return the planned collectives of each task."""

    def logical_mesh(self, task: str) -> LogicalMesh:
        """Return the logical mesh a task runs on."""


@frozen(kw_only=True)
class ExecutableAudit:
    """What the audit of an executable found, task by task; checks not made are empty or None."""

    tasks: Mapping[str, AuditReport]
    memory: Mapping[str, MemoryCheck]
    numerics: NumericsCheck | None = None

    @property
    def ok(self) -> bool:
        """Whether every check of every task holds."""
        return (
            all(report.ok for report in self.tasks.values())
            and all(check.ok for check in self.memory.values())
            and (self.numerics is None or self.numerics.ok)
        )

    @property
    def equal(self) -> bool:
        """Whether the program is the plan and moves the planned bytes within 1 % in every task."""
        return self.ok and all(report.equal for report in self.tasks.values())

    @property
    def exit_status(self) -> int:
        """0 if the program is the plan, else 1."""
        return 0 if self.ok else 1

    def summary(self) -> str:
        """Return one line: the verdict and totals over tasks."""
        reports = self.tasks.values()
        compiled = sum(len(report.lines) for report in reports)
        planned = sum(len(report.planned) for report in reports)
        sent = sum(report.compiled_bytes for report in reports)
        expected = sum(report.planned_bytes for report in reports)
        unplanned = sum(not line.ok for report in reports for line in report.lines)
        share = "" if expected == 0 else f", {sent / expected:.3f} of the plan's"
        free = sorted(task for task, report in self.tasks.items() if report.chosen_by_xla)
        if free:
            verdict = (
                f"NO PROOF: XLA chose the collectives of {', '.join(free)} (constraint executor), "
                f"{unplanned} UNPLANNED"
            )
        elif unplanned:
            verdict = f"{unplanned} UNPLANNED"
        else:
            verdict = "the program is its plan" if self.ok else "the program is NOT its plan"
        return (
            f"{verdict}: {len(self.tasks)} tasks, {compiled} compiled collectives for {planned} "
            f"planned, {format_bytes(sent)} sent per device{share}"
        )

    def text(self, *, all_lines: bool = False) -> str:
        """Return the findings as plain text; without `all_lines` only what is not as planned."""
        found = [f"{task}\n{report.text(all_lines=all_lines)}" for task, report in self._tasks()]
        found += [f"{task}: {check.text()}" for task, check in sorted(self.memory.items())]
        if self.numerics is not None:
            found.append(self.numerics.text())
        return "\n".join([*found, self.summary()])

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> Group:
        parts: list[Text | Group] = []
        for task, report in self._tasks():
            table = report.table()
            table.title, table.title_justify = task, "left"
            parts.append(Group(table))
        parts += [Text(f"{task}: {check.text()}") for task, check in sorted(self.memory.items())]
        if self.numerics is not None:
            parts.append(Text(self.numerics.text()))
        return Group(*parts, Text(self.summary(), style="" if self.ok else "bold red"))

    def print(self, console: Console) -> None:
        """Print the tables for people."""
        console.print(self)

    def _tasks(self) -> list[tuple[str, AuditReport]]:
        return sorted(self.tasks.items())


def audit_executable(
    executable: Auditable,
    *,
    backend: str = "cpu",
    memory: Mapping[str, MemoryCheck] | None = None,
    numerics: NumericsCheck | None = None,
    chosen_by_xla: Set[str] = frozenset(),
) -> ExecutableAudit:
    """Return the audit of all tasks of `executable`, compiled for `backend` ("cpu" or "cuda").

    `chosen_by_xla` are the tasks run under sharding constraints, whose collectives are no proof.
    """
    texts, planned = executable.compiled_texts(), executable.planned_collectives()
    if set(texts) != set(planned):
        raise ValueError(
            "an executable must plan the collectives of exactly the tasks it compiled, got "
            f"{sorted(set(texts) ^ set(planned))} in one of the two only"
        )
    tasks = {}
    for task, text in texts.items():
        mesh = executable.logical_mesh(task)
        sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        free, expected = task in chosen_by_xla, planned[task]
        if free:  # nothing was emitted under a planned name
            expected = tuple(evolve(one, scope="") for one in expected)
        report = account(expected, compiled_collectives(text), sizes, backend=backend)
        tasks[task] = evolve(report, chosen_by_xla=free)
    return ExecutableAudit(tasks=tasks, memory=dict(memory or {}), numerics=numerics)


def audit_tasks(
    executable: Auditable,
    tasks: Mapping[str, CompiledTask],
    planned: Planned,
    *,
    backend: str = "cpu",
    numerics: NumericsCheck | None = None,
) -> ExecutableAudit:
    """Return the audit of compiled `tasks` with their memory beside what `planned` predicts.

    Temporaries are judged on GPUs only: XLA's CPU backend ignores recomputation.
    """
    batch = {leaf.path for leaf in planned.program.inputs if leaf.role == "batch"}
    host = {leaf.path for leaf in planned.program.inputs if leaf.memory != "device"}
    memory = {
        name: task_memory(
            task,
            planned.plan.shardings[task.task.spec.stage].memory,
            batch,
            host,
            judge_peak=backend != "cpu",
        )
        for name, task in tasks.items()
    }
    free = {name for name, task in tasks.items() if task.executor == "constraint"}
    return audit_executable(
        executable, backend=backend, memory=memory, numerics=numerics, chosen_by_xla=free
    )
