"""What `alpa audit` refuses, and its exit status."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from alpa_meta.audit.cli import audit
from alpa_meta.errors import PlanError

app = typer.Typer()
app.command()(audit)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs either a corpus model"),
        (["gpt", "--corpus"], "needs either a corpus model"),
        (["gtp"], "no model 'gtp'"),
        (["gpt", "--model", "t5"], "restricts --corpus"),
        (["gpt", "--no-planner"], "nothing to audit"),
        (["plan.json"], "needs the program of the plan"),
        (["plan.json", "--model", "gpt", "--step", "m:f"], "one of them only"),
        (["plan.json", "--model", "gpt", "--no-planner"], "leaves out plan.json"),
        (["gpt", "--step", "m:f"], "give no model"),
        (["--step", "no_such_module:f"], "must be module:function"),
        (["gpt", "--mesh", "2y4"], "--mesh must be 1 to 4 sizes"),
        (["gpt", "--target", "h100"], "needs a number of devices"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_in_one_sentence(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, PlanError)
    assert message in str(result.exception)


def test_help_names_the_exit_status():
    assert "Exit status 0 only if all of them are" in " ".join(
        CliRunner().invoke(app, ["--help"]).output.split()
    )
