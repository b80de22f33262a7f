import json
import re

import pytest
from typer.testing import CliRunner

from ilp_sharding import check, read_problem, solve, write_problem
from ilp_sharding.cli import app

RUN = CliRunner()


@pytest.fixture
def file(tmp_path, random_problem):
    problem = random_problem(9, nodes=6, limit=False)
    if problem.node_cost.dtype.kind == "f" or problem.node_memory.dtype.kind == "f":
        problem = next(
            p
            for p in (random_problem(s, nodes=6, limit=False) for s in range(99))
            if p.node_cost.dtype.kind == "i"
            and p.node_memory.dtype.kind == "i"
            and solve(p).choice is not None
        )
    path = tmp_path / "problem.json"
    write_problem(problem, path)
    return path


def test_solve_ends_with_the_bracketed_list_and_check_accepts_it(file, tmp_path):
    result = RUN.invoke(app, ["solve", str(file), "--deadline", "5"])
    assert result.exit_code == 0
    last = result.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"\[\d+(, \d+)*\]", last)
    problem = read_problem(file)
    assert check(problem, json.loads(last)).cost == solve(problem).objective
    answer = tmp_path / "answer.txt"
    answer.write_text(result.stdout)
    checked = RUN.invoke(app, ["check", str(file), str(answer)])
    assert checked.exit_code == 0 and "feasible      yes" in checked.stdout


def test_pins_from_the_command_line_hold(file):
    result = RUN.invoke(app, ["solve", str(file), "--quiet", "--pin", "0=0"])
    if result.exit_code == 0:
        assert json.loads(result.stdout)[0] == 0
    wrong = RUN.invoke(app, ["solve", str(file), "--pin", "zero"])
    assert wrong.exit_code == 2 and "NODE=STRATEGY" in wrong.output


def test_stats_names_sizes_before_and_after_reduction(file):
    result = RUN.invoke(app, ["stats", str(file)])
    assert result.exit_code == 0
    for word in ("strategies", "components", "width"):
        assert word in result.stdout


def test_a_bad_file_is_one_line_on_the_error_stream(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    result = RUN.invoke(app, ["solve", str(bad)])
    assert result.exit_code == 2 and "'problem' is missing" in result.output
    assert "Traceback" not in result.output


def test_check_fails_for_choices_that_do_not_fit(file, tmp_path):
    answer = tmp_path / "answer.txt"
    answer.write_text("[0]")
    assert RUN.invoke(app, ["check", str(file), str(answer)]).exit_code == 2


def test_warm_up_compiles_and_says_so():
    result = RUN.invoke(app, ["warm-up"])
    assert result.exit_code == 0 and "compiled" in result.output
