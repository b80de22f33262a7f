"""The README's example prints what the README says it prints; links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def _blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def _run(*arguments, flags=""):
    """Return what a program prints that chooses its own number of devices."""
    environment = {**os.environ, "XLA_FLAGS": flags}
    found = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_example_prints_what_the_readme_shows():
    example, printed = _blocks("python")[0], _blocks("text")[0]
    assert _run("-c", example) == printed


def test_a_kernel_with_a_rule_runs_on_parts_as_planned():
    quick = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    text = _run(str(ROOT / "examples" / "own_kernel.py"), flags=quick)
    assert "operators on whole arrays: none" in text
    assert text.splitlines()[-1].startswith("the program is its plan")


def test_the_example_is_the_file_in_examples():
    assert _blocks("python")[0] == (ROOT / "examples" / "quickstart.py").read_text()


def test_every_local_link_and_picture_exists():
    text = README.read_text()
    for path in ROOT.glob("docs/*.md"):
        text += path.read_text().replace("](../", "](").replace("](images/", "](docs/images/")
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    local = [target for target in targets if "://" not in target]
    missing = [
        target
        for target in local
        if not (ROOT / target).exists() and not (ROOT / "docs" / target).exists()
    ]
    assert local
    assert not missing
