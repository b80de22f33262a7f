import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_runs():
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(example, str(README), "exec"), names)
    assert names["mesh"].shape == (2, 8)
