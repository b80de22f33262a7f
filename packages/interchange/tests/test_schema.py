"""The published JSON Schemas."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from alpa_interchange import ParallelPlan, ShardingProblem, ShardingSpec, document, to_json
from alpa_interchange.schema import FOLDER, documents, main, schema_of, schema_text

GOLDEN = Path(__file__).parent / "golden"


def validator(name: str) -> Draft202012Validator:
    """Return what checks documents against the published file."""
    return Draft202012Validator(json.loads((FOLDER / f"{name}.json").read_text()))


def edited(*path: Any, value: Any) -> Any:
    """Return the golden plan's document with the part at `path` replaced."""
    changed = json.loads((GOLDEN / "plan.json").read_text())
    place = changed["value"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return changed


def problem(**changes: Any) -> ShardingProblem:
    values = {
        "num_strategies": [2, 1],
        "node_cost": [0.0, np.inf, 1.0],
        "node_memory": [0, 0, 0],
        "live": [[0, 1], [0, 1]],
        "edges": [[0, 1]],
        "edge_cost": [0.5, np.inf],
    }
    return ShardingProblem(**{**values, **changes})


def test_every_document_has_a_schema_that_is_current() -> None:
    written = {path.name: path.read_text() for path in FOLDER.iterdir()}
    made = {f"{name}.json": schema_text(kind) for name, kind in documents().items()}
    assert written == made, "run python -m alpa_interchange.schema --write"


@pytest.mark.parametrize("name", documents())
def test_every_schema_is_one(name: str) -> None:
    Draft202012Validator.check_schema(json.loads((FOLDER / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", ["plan.json", "plan-0.1.json", "plan-0.2.json"])
def test_golden_plans_of_all_versions_are_valid(name: str) -> None:
    validator("ParallelPlan").validate(json.loads((GOLDEN / name).read_text()))


@pytest.mark.parametrize(
    "value",
    [problem(), problem(memory_limit=8.0, node_names=("a", "b")), ShardingSpec(((), ("x",)))],
)
def test_what_is_written_is_valid(value: Any) -> None:
    validator(type(value).__name__).validate(json.loads(to_json(value)))


def test_arrays_beside_the_document_are_valid(tmp_path: Path) -> None:
    large = problem(
        num_strategies=[400, 400],
        node_cost=np.zeros(800),
        node_memory=np.zeros(800),
        edge_cost=np.zeros(160_000),
    )
    document.save(large, tmp_path / "problem.json")
    assert (tmp_path / "problem.json.npz").exists()
    validator("ShardingProblem").validate(json.loads((tmp_path / "problem.json").read_text()))


@pytest.mark.parametrize(
    "broken",
    [
        {**edited("step_seconds", value=1.0), "schema": "StagePlan"},
        {**edited("step_seconds", value=1.0), "version": "1.0"},
        edited("step_seconds", value="fast"),
        edited("step_seconds", value=-1.0),
        edited("colour", value="red"),
        edited("layers", value=None),
        edited("tasks", "tasks", 0, "phase", value="jump"),
        edited("cluster", "host_groups", 0, "num_hosts", value=0),
        edited("shardings", 0, "operators", 0, "names", value=[]),
        edited("shardings", 0, "operators", 0, "strategy", "assignment", value=[["k"]]),
        edited("shardings", 0, "executor", value="magic"),
    ],
)
def test_what_the_reader_refuses_is_invalid(broken: Any) -> None:
    with pytest.raises(document.DocumentError):
        document.from_json(json.dumps(broken), ParallelPlan)
    assert not validator("ParallelPlan").is_valid(broken)


def test_the_command_prints_a_schema_and_names_what_there_is(capsys: Any) -> None:
    assert main(["ParallelPlan"]) == 0
    assert json.loads(capsys.readouterr().out) == schema_of(ParallelPlan)
    assert main([]) == 0
    assert capsys.readouterr().out.split() == list(documents())
    assert main(["Plan"]) == 2
    assert "give the name of one document: " in capsys.readouterr().err
