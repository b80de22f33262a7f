"""Operators are known by name in one folder."""

import ast
from pathlib import Path

import pytest
from jax import lax

import alpa_meta
from alpa_interchange.rule import REDUCTIONS
from alpa_meta.operators import known_primitives
from alpa_meta.operators.regions import primitives

ROOT = Path(alpa_meta.__file__).parent
FREE = {
    *REDUCTIONS,  # how sharding rules say that partial results combine
    "shard_map",  # the name of an executor
    "stage",  # of a pipeline
    "split",  # how microbatches hold a value, a word of DTensor
}
ALLOWED = {
    "audit/hlo.py": ("while concatenate", "opcodes of compiled programs"),
    "checkpoints/leaves.py": ("name", "what a leaf is in a checkpoint's manifest"),
    "checkpoints/saved_leaves.py": ("complex", "the kind of a leaf in a checkpoint's manifest"),
    "compat.py": ("name", "a parameter that Pallas calls have"),
    "execution/combiners.py": ("all_gather reduce_scatter", "options of XLA"),
    "extras.py": ("checkpoint", "the name of an extra"),
    "report/chrome_trace.py": ("name", "a field of Chrome's traces"),
    "report/run_commands.py": ("name", "a label of a metric"),
    "trainer/monitor.py": ("name", "a label of a metric"),
    "inter_op/scan_cutting.py": ("slice", "what an added equation is for"),
    "intra_op/bucketed_traffic.py": ("slice", "a step of a conversion between specs"),
    "spmd/completion.py": ("slice", "a step of a conversion between specs"),
    "trainer/run_folder.py": ("checkpoint", "the name of a folder"),
}


def primitive_names():
    of_jax = {getattr(lax, name).name for name in dir(lax) if name.endswith("_p")}
    known = {name.partition(":")[0] for name in known_primitives()} | primitives()
    own = {name for name in known if name.startswith(("alpa_", "test_"))}
    return (known | of_jax) - FREE - own


def literals(source):
    """Return the strings of a file, but for those of annotations and documentation."""
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def found_in(path):
    return literals(path.read_text()) & primitive_names()


def files():
    paths = [path for path in ROOT.rglob("*.py") if "operators" not in path.parts]
    return {path.relative_to(ROOT).as_posix(): path for path in paths}


def test_no_file_outside_operators_names_a_primitive():
    found = {name: found_in(path) for name, path in files().items()}
    unexpected = {
        name: names - set(ALLOWED.get(name, ("",))[0].split()) for name, names in found.items()
    }
    assert {name: names for name, names in unexpected.items() if names} == {}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_is_there(name):
    names, _ = ALLOWED[name]
    assert found_in(files()[name]) >= set(names.split()) & primitive_names()


def test_no_file_outside_operators_compares_beginnings_of_names():
    for name, path in files().items():
        if name not in ALLOWED:
            assert "primitive.name.startswith" not in path.read_text(), name


def test_a_planted_name_is_found():
    assert literals("if eqn.primitive.name == 'dot_general': pass") & primitive_names()
