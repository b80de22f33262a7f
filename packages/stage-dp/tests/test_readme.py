"""The README's example prints what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import alpa_interchange
import stage_dp

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="README.md is not beside the tests")
def test_the_example_prints_what_the_readme_shows():
    text = README.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    shown = re.search(r"prints\n\n```\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.group(1), {"alpa_interchange": alpa_interchange, "stage_dp": stage_dp})
    assert printed.getvalue() == shown.group(1)
