"""What an account says to people, and its arithmetic."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from alpa_meta.audit.account import account
from alpa_meta.audit.hlo import CompiledCollective
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.audit.report import format_bytes

MESH = {"x": 2, "y": 2}
ALONG_Y = ((0, 1), (2, 3))


def compiled(kind="all-reduce", size=1000, groups=ALONG_Y, **more):
    found = {
        "name": "c",
        "kind": kind,
        "parts": (size,),
        "dtypes": ("float32",),
        "groups": groups,
        "channel": 1,
        "op_name": "jit(step)/psum",
        "source": "spmd.py:9 (emit)",
        "trips": 1,
        "promoted": False,
    }
    return CompiledCollective(**{**found, **more})


def planned(kind="all-reduce", size=1000, axes=("y",), **more):
    return PlannedCollective(kind=kind, axes=axes, bytes=size, dtype="float32", **more)


def test_equal_programs_say_so_with_the_user_s_line():
    report = account([planned(source="model.py:3 (loss)")], [compiled()], MESH)
    assert report.text().splitlines()[1].split() == [
        "=", "all-reduce", "y", "1.0", "kB", "1", "float32", "model.py:3", "(loss)", "as", "planned"
    ]  # fmt: skip
    assert report.summary() == (
        "the program is its plan: 1 compiled collectives for 1 planned (0 merged into others, "
        "0 dropped), 1.0 kB sent per device, 1.000 of the plan's 1.0 kB"
    )


def test_the_short_text_shows_only_differences():
    plan = [planned(), planned(kind="all-gather")]
    report = account(plan, [compiled(), compiled(kind="all-to-all", op_name="", source="")], MESH)
    shown = report.text(all_lines=False)
    assert "as planned" not in shown
    assert "+  all-to-all" in shown and "UNPLANNED" in shown
    assert "-  all-gather" in shown and "planned, dropped by XLA" in shown


def test_the_table_has_every_line_and_a_loop_of_unknown_length():
    report = account([planned(trips=None)], [compiled(trips=None)], MESH)
    shown = StringIO()
    Console(width=140, file=shown).print(report.table())
    assert "?" in shown.getvalue() and "the program is its plan" in shown.getvalue()


@pytest.mark.parametrize(("size", "equal"), [(1000, True), (995, True), (985, False)])
def test_equality_is_within_one_percent(size, equal):
    report = account([planned()], [compiled(size=size)], MESH)
    assert report.ok and report.equal is equal


def test_no_collectives_at_all_are_equal_and_collectives_without_a_plan_are_not():
    assert account([], [], MESH).equal
    assert account([], [compiled()], MESH).ratio == float("inf")


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")],
)
def test_bytes_are_shown_in_powers_of_ten(count, shown):
    assert format_bytes(count) == shown
