"""The README's example prints what the README says it prints; links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from alpa_meta.command_list import application

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


DOCUMENTS = [README, *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]


def _commands(text):
    """Return the commands `alpa ...` of a document, in blocks and in lines, as lists of words."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"(?<!`)`([^`\n]+)`", text)
    found = [shlex.split(line, comments=True) for line in lines if re.match(r" *alpa [a-z]", line)]
    return [words[1:] for words in found]


def _unknown(words):
    """Return the options of a command that it does not have."""
    group = typer.main.get_command(application(words))
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands[words[0]]
    known = {name for one in command.params for name in [*one.opts, *one.secondary_opts]}
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    return given - known - {"--help"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_document_has_the_options_it_is_shown_with(path):
    for words in _commands(path.read_text()):
        assert not _unknown(words), f"alpa {shlex.join(words)}"


def test_commands_of_documents_are_found_and_judged():
    assert len(_commands((ROOT / "docs" / "how-to.md").read_text())) > 20
    found = _commands("```sh\nalpa plan --cluster h100:8 \\\n  --colour red  # a remark\n```\n")
    assert found == [["plan", "--cluster", "h100:8", "--colour", "red"]]
    assert _unknown(found[0]) == {"--colour"}
