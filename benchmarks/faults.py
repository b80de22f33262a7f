"""The table of faults in docs/how-to.md, made of what the tests of them find.

    python benchmarks/faults.py [TEST ...]

Runs the tests marked `fault(what happens, what becomes of the run)` one after another and writes a
row for each fault: the words of the mark, how many tests of which files passed, and the longest
seconds that one measured under the fault's name. Rows of tests that are not run stay as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "how-to.md"
HEAD = "| fault | what becomes of the run | tested by | seconds |\n|---|---|---|---|\n"
MARKED = sorted(
    path
    for folder in (ROOT / "tests", ROOT / "packages")
    for path in folder.rglob("test_*.py")
    if "mark.fault(" in path.read_text() and ".venv" not in path.parts
)


class Rows:
    """Collects a row for each fault of the tests that are run."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, dict[str, Counter[str]], list[float]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        """Note what a test found."""
        report = yield
        if report.when != "call" and not report.skipped and not report.failed:
            return report
        measured: dict[str, Any] = dict(item.user_properties)
        outcome = {"passed": "passed", "failed": "**failed**"}.get(report.outcome, "not run")
        for mark in item.iter_markers("fault"):
            fault, result = mark.args
            _, tests, seconds = self.found.setdefault(fault, (result, {}, []))
            tests.setdefault(Path(item.path).name, Counter())[outcome] += 1
            if fault in measured:
                seconds.append(measured[fault])
        return report

    def rows(self) -> dict[str, str]:
        """Return the row of each fault: the slowest of its recoveries."""
        made = {}
        for fault, (result, tests, seconds) in self.found.items():
            where = "; ".join(
                f"`{name}`, " + ", ".join(f"{count} {outcome}" for outcome, count in found.items())
                for name, found in tests.items()
            )
            shown = f"{max(seconds):.1f}" if seconds else ""
            made[fault] = f"| {fault} | {result} | {where} | {shown} |\n"
        return made


def main() -> int:
    """Run the tests and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", help="files of tests; by default all that have marks")
    given = parser.parse_args()
    text = DOCUMENT.read_text()
    start = text.index(HEAD) + len(HEAD)
    stop = text.index("\n\n", start) + 1
    rows = {line.split("|")[1].strip(): line for line in text[start:stop].splitlines(keepends=True)}
    collected = Rows()
    options = ["-q", "-m", "fault", "-n", "0", "-p", "no:cacheprovider"]
    status = pytest.main([*options, *(given.tests or map(str, MARKED))], plugins=[collected])
    found = collected.rows()
    rows.update(found)
    DOCUMENT.write_text(text[:start] + "".join(rows.values()) + text[stop:])
    print(f"wrote {len(found)} of {len(rows)} rows of {DOCUMENT.relative_to(ROOT)}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
