"""The account of one compiled program: a value, a table and plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen
from rich.table import Table
from rich.text import Text

from alpa_meta.audit.hlo import CompiledCollective
from alpa_meta.audit.planned import PlannedCollective

EQUALITY = 0.01
"""Relative difference of link bytes below which a program counts as equal to its plan."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


@frozen(kw_only=True)
class AuditLine:
    """One compiled collective and the planned ones that account for it.

    `axes` is None where its groups are lines of no mesh axes; `unplanned_bytes` of its result are
    accounted for by nothing. `widened` is the share of its bytes that are 16-bit floats, which the
    CPU backend sends as float32. `notes` name what XLA did to the planned collectives, `deviation`
    how it differs from the one it was emitted as.
    """

    compiled: CompiledCollective
    axes: tuple[str, ...] | None
    planned: tuple[PlannedCollective, ...]
    unplanned_bytes: int
    widened: float = 0.0
    notes: tuple[str, ...] = ()
    deviation: str = ""

    @property
    def ok(self) -> bool:
        """Whether every byte of it is planned."""
        return self.unplanned_bytes == 0

    @property
    def source(self) -> str:
        """The user's line of the first planned collective, else the compiled program's own."""
        named = [one.source for one in self.planned if one.source]
        return named[0] if named else self.compiled.source

    @property
    def verdict(self) -> str:
        """What happened, in a few words."""
        if self.axes is None:
            return "UNPLANNED: its groups are not along mesh axes"
        if not self.ok:
            of = f"{format_bytes(self.unplanned_bytes)} of it " if self.planned else ""
            return f"{of}UNPLANNED{': ' * bool(self.deviation)}{self.deviation}"
        return "; ".join(self.notes) or "as planned"


@frozen(kw_only=True)
class Dropped:
    """A planned collective that does not run, or does not run `executions` times of its trips."""

    planned: PlannedCollective
    executions: int


@frozen(kw_only=True)
class AuditReport:
    """Every compiled collective of one program, accounted for by its plan or not."""

    axis_sizes: Mapping[str, int]
    lines: tuple[AuditLine, ...]
    dropped: tuple[Dropped, ...]
    planned: tuple[PlannedCollective, ...]
    chosen_by_xla: bool = False

    @property
    def ok(self) -> bool:
        """Whether the program adds no collective, changes no kind and moves no more bytes.

        Never where XLA chose the collectives (constraint executor): agreement proves nothing there.
        """
        return not self.chosen_by_xla and all(line.ok for line in self.lines)

    @property
    def exit_status(self) -> int:
        """0 if the program is the plan, else 1."""
        return 0 if self.ok else 1

    @property
    def planned_bytes(self) -> float:
        """Bytes one device sends by the plan (ring algorithms)."""
        return sum(one.link_bytes(self.axis_sizes) for one in self.planned)

    @property
    def compiled_bytes(self) -> float:
        """Bytes one device sends in the compiled program, widened floats at 16 bits."""
        return sum(line.compiled.link_bytes * (1 - line.widened / 2) for line in self.lines)

    @property
    def ratio(self) -> float:
        """Compiled over planned bytes; 1 where both are 0."""
        if self.planned_bytes == 0:
            return 1.0 if self.compiled_bytes == 0 else float("inf")
        return self.compiled_bytes / self.planned_bytes

    @property
    def equal(self) -> bool:
        """Whether the program is the plan and moves the planned bytes within 1 %."""
        return self.ok and abs(self.ratio - 1) <= EQUALITY

    def summary(self) -> str:
        """Return one line: the verdict, counts and bytes."""
        unplanned = sum(not line.ok for line in self.lines)
        merged = sum(len(line.planned) - 1 for line in self.lines if len(line.planned) > 1)
        verdict = "the program is its plan" if self.ok else f"{unplanned} UNPLANNED"
        if self.chosen_by_xla:
            verdict = f"NO PROOF, XLA chose the collectives (constraint executor), {verdict}"
        return (
            f"{verdict}: {len(self.lines)} compiled collectives for {len(self.planned)} planned "
            f"({merged} merged into others, {len(self.dropped)} dropped), "
            f"{format_bytes(self.compiled_bytes)} sent per device, "
            f"{self.ratio:.3f} of the plan's {format_bytes(self.planned_bytes)}"
        )

    def text(self, *, all_lines: bool = True) -> str:
        """Return the account as plain text; without `all_lines` only what differs from the plan."""
        rows = [row for row in self._rows() if all_lines or row[-1] != "as planned"]
        widths = [max(len(row[i]) for row in [_HEADER, *rows]) for i in range(len(_HEADER))]
        shown = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in [_HEADER, *rows]
        ]
        return "\n".join([*(shown if rows else []), self.summary()])

    def table(self) -> Table:
        """Return the account as a table for a terminal."""
        table = Table(caption=self.summary(), caption_justify="left")
        for name in _HEADER:
            table.add_column(name, justify="right" if name in ("bytes", "trips") else "left")
        for row in self._rows():
            style = "red" if "UNPLANNED" in row[-1] else "dim" if row[0] == "-" else ""
            table.add_row(*(Text(cell) for cell in row), style=style)
        return table

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for line in self.lines:
            compiled = line.compiled
            yield (
                "+" if not line.ok else "=" if line.verdict == "as planned" else "~",
                compiled.kind,
                "?" if line.axes is None else ",".join(line.axes),
                format_bytes(compiled.bytes),
                "?" if compiled.trips is None else str(compiled.trips),
                "/".join(sorted(set(compiled.dtypes))),
                line.source or compiled.op_name,
                line.verdict,
            )
        for one in self.dropped:
            planned = one.planned
            yield (
                "-",
                planned.kind,
                ",".join(planned.axes),
                format_bytes(planned.bytes),
                str(one.executions),
                planned.dtype,
                planned.source or planned.reason,
                "planned, dropped by XLA",
            )


_HEADER = ("", "kind", "axes", "bytes", "trips", "dtype", "source", "account")


def format_bytes(count: float) -> str:
    """Return a number of bytes for people: "1.5 MB" (powers of ten)."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable: the last unit takes every count")
