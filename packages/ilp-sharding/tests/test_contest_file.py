import gzip
import json

import numpy as np
import pytest

from ilp_sharding import ContestFileError, read_problem, solve, write_problem
from ilp_sharding.contest_file import parse_choice, parse_problem

EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


def _changed(*path, value):
    document = json.loads(json.dumps(EXAMPLE))
    place = document["problem"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(document).encode()


def test_the_example_of_the_contest_reads_and_solves():
    problem = parse_problem(json.dumps(EXAMPLE, indent=1).encode())
    assert problem.num_nodes == 5 and problem.memory_limit == 50
    assert problem.edge_cost[2:5].tolist() == [50, 10, 40]
    assert solve(problem).status == "optimal"


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_written_problems_read_back_equal(tmp_path, random_problem, name):
    for seed in range(30):
        problem = random_problem(seed)
        if not np.array_equal(problem.node_memory, np.rint(problem.node_memory)):
            continue
        if problem.node_cost.dtype.kind == "f":
            continue
        write_problem(problem, tmp_path / name)
        again = read_problem(tmp_path / name)
        assert again.edge_cost.tolist() == problem.edge_cost.tolist()
        assert again.live.tolist() == problem.live.tolist()
        assert again.memory_limit == problem.memory_limit


@pytest.mark.parametrize("piece", [8, 32])
def test_long_arrays_are_parsed_in_pieces(monkeypatch, piece):
    monkeypatch.setattr("ilp_sharding.contest_file._PIECE", piece)  # rows are longer than 8 bytes
    problem = parse_problem(json.dumps(EXAMPLE).encode())
    assert problem.edge_cost.tolist() == [30, 40, 50, 10, 40, 90, 10, 20, 80, 60, 20, 30, 70, 60]


def test_fractions_cannot_be_written(tmp_path, random_problem):
    problem = next(p for p in map(random_problem, range(99)) if p.node_cost.dtype.kind == "f")
    with pytest.raises(ValueError, match="whole numbers"):
        write_problem(problem, tmp_path / "p.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not valid JSON"),
        (b"[1, 2", "not valid JSON"),
        (b"[]", "'problem' is missing"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"problem": {"nodes": {"costs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}}", "JSON"),
        (_changed("nodes", "costs", value=[[1], [2, 3], [4], [5, 6], [7]]), "usages\\[2\\]"),
        (_changed("nodes", "costs", value=[[15], [], [25, 45, 35], [85, 75], [95]]), "empty"),
        (_changed("nodes", "intervals", value=[[1, 2]]), "must agree"),
        (_changed("nodes", "intervals", value=[[1, 2, 3]] * 5), "2 numbers"),
        (_changed("nodes", "intervals", value=[[-5, 2]] * 5), "negative"),
        (_changed("edges", "nodes", value=[[0, -1]] * 5), "0..4"),
        (_changed("edges", "nodes", value=[[0, 5]] * 5), "0..4"),
        (_changed("edges", "nodes", value=[[0, 1]]), "must agree"),
        (_changed("edges", "costs", value=[[1], [2], [3], [4], [5]]), "need 2"),
        (_changed("edges", "costs", value=[["1", 2], [1] * 3, [1] * 4, [1] * 3, [1] * 2]), "'1'"),
        (_changed("edges", "costs", value=[[1.5, 2], [1] * 3, [1] * 4, [1] * 3, [1] * 2]), "1.5"),
        (_changed("nodes", "costs", value=[[2**70], [1, 1], [1] * 3, [1, 1], [1]]), "63 bits"),
        (_changed("nodes", "costs", value=[[2**63], [1, 1], [1] * 3, [1, 1], [1]]), "63 bits"),
        (_changed("nodes", "costs", value=[[True], [1, 1], [1] * 3, [1, 1], [1]]), "true"),
        (_changed("nodes", "costs", value=[[None], [1, 1], [1] * 3, [1, 1], [1]]), "None"),
        (_changed("nodes", "usages", value=[[-1], [1, 1], [1] * 3, [1, 1], [1]]), "negative"),
        (json.dumps(EXAMPLE).replace("15", "NaN").encode(), "JSON"),
        (_changed("usage_limit", value="much"), "usage_limit"),
        (_changed("usage_limit", value=-1), "usage_limit"),
        (_changed("nodes", value=7), "object"),
        (_changed("nodes", "costs", value=3), "list of lists"),
        (_changed("name", value=3), "name"),
    ],
)
def test_malformed_files_give_one_clear_error(text, says):
    with pytest.raises(ContestFileError, match=says):
        parse_problem(text)


def test_files_that_cannot_be_read_say_so(tmp_path):
    whole = gzip.compress(json.dumps(EXAMPLE).encode())
    (tmp_path / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "not.json.gz").write_bytes(b"hello")
    for name in ("cut.json.gz", "not.json.gz"):
        with pytest.raises(ContestFileError, match="gzip"):
            read_problem(tmp_path / name)
    with pytest.raises(ContestFileError, match="cannot be read"):
        read_problem(tmp_path / "absent.json")


def test_solutions_are_the_last_bracketed_line():
    assert parse_choice("cost 5\n[1, 2]\n[0, 3]\n") == (0, 3)
    for wrong in ("", "nothing", "[1, 2", "[1.5]", "[true]", '["a"]'):
        with pytest.raises(ContestFileError):
            parse_choice(wrong)
