import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def test_the_example_finds_what_the_readme_shows():
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(example, str(README), "exec"), names)
    found = names["solution"]
    shown = (found.choice, found.objective, found.lower_bound, found.gap, found.status)
    assert f"# {shown}" in example
