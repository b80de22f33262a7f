import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_the_readme_shows():
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    before_files = example.partition("plan = load")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(before_files, str(README), "exec"), {})
    shown = re.findall(r"print\(.*\)  # (.*)", before_files)
    assert printed.getvalue().splitlines() == shown
