"""The README's examples print what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import alpa_interchange
import stage_dp

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="README.md is not beside the tests")
def test_the_examples_print_what_the_readme_shows():
    text = README.read_text()
    pairs = re.findall(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", text, re.DOTALL)
    assert len(pairs) == 3
    for code, shown in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, {"alpa_interchange": alpa_interchange, "stage_dp": stage_dp})
        assert printed.getvalue() == shown
