"""Documents: canonical text, round trips, side-cars, versions, limits and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange import document
from alpa_interchange.document import (
    DocumentError,
    from_json,
    load,
    save,
    to_json,
    why_unwritable,
)
from alpa_interchange.mesh import LogicalMesh, MeshAxis
from alpa_interchange.selection import ShardingProblem
from alpa_interchange.tensor import ShardingSpec, TensorType

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=4, bandwidth=5e9)))
MESH_TEXT = """{
 "schema": "LogicalMesh",
 "value": {
  "axes": [
   {
    "name": "x",
    "size": 2
   },
   {
    "bandwidth": 5000000000.0,
    "name": "y",
    "size": 4
   }
  ]
 },
 "version": "0.3"
}
"""


def edited(**changes: object) -> str:
    """Return the mesh's document with top-level fields changed."""
    return json.dumps({**json.loads(MESH_TEXT), **changes})


def problem(strategies: int = 3, cost: float = 1.0) -> ShardingProblem:
    """Return a problem of two nodes with as many strategies each, one of them forbidden."""
    node_cost = np.full(2 * strategies, cost)
    node_cost[0] = np.inf
    return ShardingProblem(
        num_strategies=[strategies, strategies],
        node_cost=node_cost,
        node_memory=np.zeros(2 * strategies),
        live=[[0, 1], [0, 1]],
        edges=[[0, 1]],
        edge_cost=np.arange(strategies * strategies),
    )


# ------------------------------------------------------------------ text and round trips


def test_the_text_of_a_document_is_canonical() -> None:
    assert to_json(MESH) == MESH_TEXT
    assert from_json(MESH_TEXT, LogicalMesh) == MESH


def test_the_order_of_keys_and_white_space_do_not_matter() -> None:
    value = json.loads(MESH_TEXT)
    shuffled = json.dumps(dict(reversed(value.items())), indent=None)
    assert from_json(shuffled, LogicalMesh) == MESH


@settings(max_examples=50, derandomize=True)
@given(
    st.lists(st.integers(0, 2**40), max_size=5),
    st.sampled_from(["float32", "int4", "bfloat16"]),
)
def test_every_tensor_type_survives_a_round_trip(shape: list[int], dtype: str) -> None:
    value = TensorType(tuple(shape), dtype)
    assert from_json(to_json(value), TensorType) == value


@settings(max_examples=50, derandomize=True)
@given(st.floats(1e-300, 1e300))
def test_numbers_survive_a_round_trip_to_the_last_bit(bandwidth: float) -> None:
    mesh = LogicalMesh(axes=(MeshAxis(name="x", size=2, bandwidth=bandwidth),))
    assert from_json(to_json(mesh), LogicalMesh).axes[0].bandwidth == bandwidth


def test_infinite_costs_are_written_as_text_and_come_back() -> None:
    text = to_json(problem())
    assert '"inf"' in text
    assert from_json(text, ShardingProblem) == problem()


# ------------------------------------------------------------------ files


def test_a_small_problem_is_one_file(tmp_path: Path) -> None:
    save(problem(), tmp_path / "problem.json")
    assert [path.name for path in tmp_path.iterdir()] == ["problem.json"]
    assert load(tmp_path / "problem.json", ShardingProblem) == problem()


def test_a_large_problem_keeps_its_arrays_in_a_side_car(tmp_path: Path) -> None:
    large = problem(400)
    save(large, tmp_path / "problem.json")
    assert {path.name for path in tmp_path.iterdir()} == {"problem.json", "problem.json.npz"}
    assert (tmp_path / "problem.json").stat().st_size < 2000
    assert load(tmp_path / "problem.json", ShardingProblem) == large


def test_saving_a_small_value_over_a_large_one_removes_the_side_car(tmp_path: Path) -> None:
    save(problem(400), tmp_path / "problem.json")
    save(problem(), tmp_path / "problem.json")
    assert [path.name for path in tmp_path.iterdir()] == ["problem.json"]


def test_a_failed_save_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "mesh.json"
    save(MESH, path)
    broken = MeshAxis(name="x", size=2)
    object.__setattr__(broken, "bandwidth", float("nan"))
    with pytest.raises(DocumentError, match="must be finite"):
        save(LogicalMesh(axes=(broken,)), path)
    assert path.read_text() == MESH_TEXT
    assert [file.name for file in tmp_path.iterdir()] == ["mesh.json"]


def test_a_missing_side_car_is_refused(tmp_path: Path) -> None:
    save(problem(400), tmp_path / "problem.json")
    (tmp_path / "problem.json.npz").unlink()
    with pytest.raises(DocumentError, match=r"is missing from the \.npz"):
        load(tmp_path / "problem.json", ShardingProblem)


def test_a_damaged_side_car_is_refused(tmp_path: Path) -> None:
    save(problem(400), tmp_path / "problem.json")
    bulk = tmp_path / "problem.json.npz"
    content = bulk.read_bytes()
    for damaged in (b"", b"PK", content[: len(content) // 2]):
        bulk.write_bytes(damaged)
        with pytest.raises(DocumentError, match="is not a readable array file"):
            load(tmp_path / "problem.json", ShardingProblem)


def test_pickled_objects_in_a_side_car_are_never_read(tmp_path: Path) -> None:
    save(problem(400), tmp_path / "problem.json")
    objects = np.array([{"any": "object"}], dtype=object)
    np.savez(tmp_path / "problem.json.npz", a0=objects, allow_pickle=True)
    with pytest.raises(DocumentError, match="is not a readable array file"):
        load(tmp_path / "problem.json", ShardingProblem)


def test_a_side_car_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(problem(400), tmp_path / "problem.json")
    monkeypatch.setattr(document, "MAX_DOCUMENT_BYTES", 100_000)
    with pytest.raises(DocumentError, match="unpacks to .* bytes, at most 100000 are read"):
        load(tmp_path / "problem.json", ShardingProblem)


def test_a_file_that_is_missing_too_large_or_no_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mesh.json"
    with pytest.raises(DocumentError, match=r"mesh\.json: cannot be read"):
        load(path, LogicalMesh)
    with pytest.raises(DocumentError, match="cannot be read: Is a directory"):
        load(tmp_path, LogicalMesh)
    path.write_bytes(b"\x00\xff\xfe")
    with pytest.raises(DocumentError, match="is not UTF-8 text"):
        load(path, LogicalMesh)
    monkeypatch.setattr(document, "MAX_DOCUMENT_BYTES", 2)
    with pytest.raises(DocumentError, match="3 bytes; a document has at most 2"):
        load(path, LogicalMesh)


# ------------------------------------------------------------------ versions


@pytest.mark.parametrize("version", ["0.0", "0.1", "0.2"])
def test_older_minor_versions_are_read(version: str) -> None:
    assert from_json(edited(version=version), LogicalMesh) == MESH


def test_a_newer_minor_version_is_read_if_its_fields_are_known() -> None:
    assert from_json(edited(version="0.9"), LogicalMesh) == MESH


def test_a_field_that_is_not_known_is_refused_by_name() -> None:
    value = {**json.loads(MESH_TEXT)["value"], "colour": "red"}
    with pytest.raises(DocumentError, match="colour"):
        from_json(edited(version="0.9", value=value), LogicalMesh)


@pytest.mark.parametrize("version", ["1.0", "12.3"])
def test_a_newer_major_version_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(DocumentError, match=rf"version {version}, but this reader knows 0\.3"):
        from_json(edited(version=version), LogicalMesh)


@pytest.mark.parametrize("version", [None, 1, "one", "1", "1.2.3"])
def test_a_version_that_is_no_version_is_refused(version: object) -> None:
    with pytest.raises(DocumentError, match=r"is not MAJOR\.MINOR"):
        from_json(edited(version=version), LogicalMesh)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[]", "must be an object with 'schema', 'version' and 'value'"),
        ('{"schema": "LogicalMesh"}', "must be an object with"),
        (edited(schema="ShardingSpec"), "holds a 'ShardingSpec', but a 'LogicalMesh' is needed"),
        (edited(value=[]), "is not a valid LogicalMesh"),
        (edited(value={}), "is not a valid LogicalMesh"),
        (edited(value={"axes": [{"name": "x", "size": "two"}]}), "must be an integer"),
        (edited(value={"axes": [{"name": "x", "size": True}]}), "must be an integer"),
        (edited(value={"axes": [{"name": "x", "size": 0}]}), "must be above 0"),
        (edited(value={"axes": [{"name": 3, "size": 2}]}), "must be a string"),
        (MESH_TEXT.replace("5000000000.0", "NaN"), "NaN is not a JSON number"),
        (MESH_TEXT.replace("5000000000.0", "1e999"), "must be finite"),
        (MESH_TEXT.replace("5000000000.0", '"fast"'), "must be a number"),
    ],
)
def test_what_is_no_valid_document_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message) as refusal:
        from_json(text, LogicalMesh, source="plan.json")
    assert str(refusal.value).startswith("plan.json: ")


def test_a_refusal_names_the_place_inside_the_value() -> None:
    axes = [{"name": "x", "size": 2}, {"name": "y", "size": -1}]
    with pytest.raises(DocumentError, match=r"value\.axes\[1\]"):
        from_json(edited(value={"axes": axes}), LogicalMesh)


@pytest.mark.parametrize(
    "array",
    [
        {"dtype": "|O", "shape": [1], "data": [1]},
        {"dtype": "<f8", "shape": [3], "data": [1, 2]},
        {"dtype": "<f8", "shape": [-1], "data": [1, 2]},
        {"dtype": "<f8", "shape": [2]},
        {"dtype": "no type", "shape": [1], "data": [1]},
        {"npz": "a0"},
        [1, 2],
        "1",
    ],
)
def test_an_array_that_is_none_is_refused(array: object) -> None:
    text = json.loads(to_json(problem()))
    text["value"]["node_memory"] = array
    with pytest.raises(DocumentError, match="is not a valid ShardingProblem"):
        from_json(json.dumps(text), ShardingProblem)


def test_deep_nesting_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(DocumentError, match="nested deeper than 64 levels"):
        from_json("[" * 100_000, LogicalMesh)


@settings(max_examples=200, derandomize=True)
@given(st.recursive(st.text('[]{}"\\é', max_size=6), lambda inner: st.lists(inner, max_size=2)))
def test_nesting_is_counted_as_a_parser_counts_it(inner: object) -> None:
    def depth(value: object) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    wrapped = inner
    for _ in range(document.MAX_DEPTH - depth(inner)):
        wrapped = [wrapped]
    with pytest.raises(DocumentError, match="must be an object"):
        from_json(json.dumps(wrapped, ensure_ascii=False), LogicalMesh)
    with pytest.raises(DocumentError, match="nested deeper than 64 levels"):
        from_json(json.dumps([wrapped], ensure_ascii=False), LogicalMesh)


def test_brackets_inside_strings_do_not_count_as_nesting() -> None:
    name = '[{"' * 100
    mesh = LogicalMesh(axes=(MeshAxis(name=name, size=2),))
    assert from_json(to_json(mesh), LogicalMesh).axes[0].name == name


def test_more_text_than_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_DOCUMENT_BYTES", 10)
    with pytest.raises(DocumentError, match="at most 10 are read"):
        from_json(MESH_TEXT, LogicalMesh)


@settings(max_examples=100, derandomize=True)
@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda b: b.decode("latin-1")))
def test_no_text_makes_the_reader_fail_in_another_way(text: str) -> None:
    with pytest.raises(DocumentError):
        from_json(text, ShardingSpec)


@settings(max_examples=150, derandomize=True)
@given(st.integers(0, len(MESH_TEXT) - 1), st.characters())
def test_one_wrong_character_is_read_or_refused(position: int, character: str) -> None:
    text = MESH_TEXT[:position] + character + MESH_TEXT[position + 1 :]
    try:
        from_json(text, LogicalMesh)
    except DocumentError:
        pass


def test_why_a_file_cannot_be_written_is_told_before_it_is(tmp_path: Path) -> None:
    assert why_unwritable(tmp_path / "new" / "plan.json") is None
    assert not (tmp_path / "new").exists()
    assert why_unwritable(tmp_path / "new" / "plan.json", makes_folder=False) is not None
    assert why_unwritable(tmp_path) == "Is a directory"
    (tmp_path / "file").write_text("")
    assert why_unwritable(tmp_path / "file") is None
    assert why_unwritable(tmp_path / "file" / "plan.json") == "Not a directory"
