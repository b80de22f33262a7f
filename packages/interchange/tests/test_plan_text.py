"""What people see of a plan."""

from pathlib import Path

from alpa_interchange import ParallelPlan, load
from alpa_interchange.plan_text import COLUMNS, number_text, stage_rows

PLAN = load(Path(__file__).parent / "golden" / "plan.json", ParallelPlan)


def test_a_plan_is_one_line_where_values_are_shown():
    text = repr(PLAN)
    assert text.startswith("<ParallelPlan: 2 stages, ") and "\n" not in text
    assert "4 devices of host: 1.25 s per step" in text and "gap 25.0 %" in text


def test_a_printed_plan_has_a_row_for_every_stage():
    lines = str(PLAN).splitlines()
    assert len(lines) == 2 + PLAN.num_stages
    assert lines[1].split() == list(COLUMNS)
    assert all(cell in lines[2] for cell in stage_rows(PLAN)[0])


def test_notebooks_show_a_table():
    text = PLAN._repr_html_()
    assert text.count("<tr>") == 1 + PLAN.num_stages
    assert "<script" not in text


def test_numbers_are_written_as_ranges():
    assert number_text([0, 1, 2, 3]) == "0-3"
    assert number_text([8, 0, 1]) == "0-1, 8"
