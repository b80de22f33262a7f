"""The table of faults in docs/how-to.md, made of what the tests of them find.

    python benchmarks/faults.py
    python benchmarks/faults.py versions "full disk"

Runs the tests marked `fault(what happens, what becomes of the run)` one after another and writes a
row for each fault: the words of the mark, how many tests of which files passed, and the longest
seconds that one measured under the fault's name. With words, only faults that contain one of them
are tested, each by all of its tests, and the other rows stay as they are. A row whose fault no test
is marked with is taken out.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "how-to.md"
HEAD = "| fault | what becomes of the run | tested by | seconds |\n|---|---|---|---|\n"


def marked() -> dict[str, tuple[str, Counter[Path]]]:
    """Return, for each fault that tests are marked with, what becomes of the run, and how many
    marks the files have."""
    found: dict[str, tuple[str, Counter[Path]]] = {}
    for path in sorted([*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/**/test_*.py")]):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "mark.fault(" in text else ():
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="fault"),
                    args=[ast.Constant(value=str(fault)), ast.Constant(value=str(result))],
                ):
                    said, files = found.setdefault(fault, (result, Counter()))
                    if said != result:
                        raise ValueError(f"{path}: {fault!r} has another result elsewhere")
                    files[path] += 1
    return found


def table(text: str) -> dict[str, str]:
    """Return the rows of the table in the document, by fault."""
    rows = text[text.index(HEAD) + len(HEAD) :].partition("\n\n")[0]
    return {row.split("|")[1].strip(): f"{row}\n" for row in rows.splitlines()}


def is_meant(fault: str, words: Sequence[str]) -> bool:
    """Return whether a fault contains one of some words, or there are none."""
    return not words or any(word in fault for word in words)


class Rows:
    """Collects a row for each fault of the tests that are run: of the faults meant by `words`."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.found: dict[str, tuple[str, dict[str, Counter[str]], list[float]]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of the faults that are meant."""
        items[:] = [
            item
            for item in items
            if any(is_meant(mark.args[0], self.words) for mark in item.iter_markers("fault"))
        ]

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
            if not is_meant(fault, self.words):
                continue
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
    parser.add_argument("fault", nargs="*", help="words of the faults to test; by default all")
    given = parser.parse_args()
    faults = marked()
    files = sorted(
        {
            str(path)
            for fault, (_, paths) in faults.items()
            if is_meant(fault, given.fault)
            for path in paths
        }
    )
    if not files:
        parser.error(f"no fault has the words {given.fault}; they are {', '.join(faults)}")
    collected = Rows(given.fault)
    options = ["-q", "-m", "fault", "-n", "0", "-p", "no:cacheprovider"]
    status = pytest.main([*options, *files], plugins=[collected])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(f"the tests did not all run; {DOCUMENT.relative_to(ROOT)} stays as it is")
        return int(status)
    found, text = collected.rows(), DOCUMENT.read_text()
    old = table(text)
    rows = {fault: row for fault, row in (old | found).items() if fault in faults}
    DOCUMENT.write_text(text.replace("".join(old.values()), "".join(rows.values())))
    print(f"wrote {len(found)} of {len(rows)} rows of {DOCUMENT.relative_to(ROOT)}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
