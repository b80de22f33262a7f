import contextlib
import io
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_prints_what_the_readme_shows():
    blocks = README.read_text().split("```")
    code, shown = blocks[1].removeprefix("python\n"), blocks[3].strip()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(README), "exec"), {})
    assert printed.getvalue().strip() == shown
