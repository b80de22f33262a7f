"""The table of faults in docs/how-to.md is what `benchmarks/faults.py` makes of the tests."""

import re
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PASSED = re.compile(r"`(test_\w+\.py)`, (\d+) passed(?=;| \|)")


def test_every_row_has_the_words_and_the_files_of_the_tests_that_are_marked(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from faults import DOCUMENT, marked, table

    faults, rows = marked(), table(DOCUMENT.read_text())
    assert len(faults) > 10 and set(faults) == set(rows)
    for fault, row in rows.items():
        result, files = faults[fault]
        assert row.split("|")[2].strip() == result, row
        passed = {name: int(count) for name, count in PASSED.findall(row)}
        assert set(passed) == {path.name for path in files}, row
        for path, marks in files.items():
            assert passed[path.name] >= marks, row  # a test of several cases passes several times
