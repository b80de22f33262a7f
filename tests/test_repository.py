"""The promises the repository makes about itself: the star, the closures, the wheels, the files."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
# Distributions for machines with a GPU: in an extra, never installed here.
NOT_INSTALLED = {"cupy": "cupy-cuda12x", "cupyx": "cupy-cuda12x"}
# Declared for jax, which imports them itself: its CUDA plugins, and what jax.export writes with.
FOUND_BY_JAX = {"flatbuffers", "jax-cuda12-pjrt", "jax-cuda12-plugin"}
HEAVY = {"cvxpy", "flax", "jax", "jaxlib", "matplotlib", "optax", "ray"}

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


@cache
def project(package: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return found


def import_name(package: Path) -> str:
    return str(project(package)["name"]).replace("-", "_")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(package: Path) -> tuple[set[str], set[str]]:
    """Return the distributions a package requires, and those one of its extras adds."""
    table = project(package)
    extras = [line for lines in table.get("optional-dependencies", {}).values() for line in lines]
    required, optional = (
        {normal(Requirement(line).name) for line in lines}
        for lines in (table["dependencies"], extras)
    )
    return required, optional - required


@cache
def distribution_of() -> dict[str, set[str]]:
    found = {name: set(map(normal, owners)) for name, owners in packages_distributions().items()}
    ours = {import_name(package): {project(package)["name"]} for package in PACKAGES}
    return found | ours | {name: {owner} for name, owner in NOT_INSTALLED.items()}


@cache
def imported(package: Path) -> dict[str, set[str]]:
    """Return the top-level modules that a package's sources import, each with the files that do."""
    names: dict[str, set[str]] = {}
    for path in sorted((package / import_name(package)).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                argument = node.args[0]
                modules = [str(argument.value)] if isinstance(argument, ast.Constant) else []
            else:
                continue
            for module in modules:
                names.setdefault(module.split(".")[0], set()).add(str(path.relative_to(ROOT)))
    return {
        name: files
        for name, files in names.items()
        if name not in sys.stdlib_module_names and name != import_name(package)
    }


@each_package
def test_every_import_is_of_a_declared_dependency(package):
    required, optional = declared(package)
    for name, files in imported(package).items():
        owners = distribution_of().get(name, set())
        assert owners & (required | optional), (
            f"{sorted(files)} import {name!r}, which comes from {sorted(owners) or 'nowhere'}; "
            f"declare it in {package.name}/pyproject.toml"
        )


@each_package
def test_every_declared_dependency_is_imported(package):
    required, optional = declared(package)
    owners = set().union(*(distribution_of().get(name, set()) for name in imported(package)), set())
    assert (required | optional) - owners - FOUND_BY_JAX == set()


@each_package
def test_a_package_depends_on_the_schema_alone_unless_it_is_the_product(package):
    ours = {project(path)["name"] for path in PACKAGES}
    required, optional = declared(package)
    siblings = (required | optional) & ours
    match package.name:
        case "interchange":
            assert siblings == set()
        case "alpa-meta":
            assert siblings == ours - {"alpa-meta"}
        case _:
            assert siblings == {"alpa-interchange"}


# Objects are keys themselves where they hash by identity, and have numbers or owners elsewhere.
# This file has the keys of what is neither ours nor hashable.
TOLD_APART_BY_ID = {"packages/alpa-meta/alpa_meta/identity.py"}


def asks_for_ids(source: str) -> bool:
    """Return whether a file calls `id` or hands it on."""
    names = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
    return any(name.id == "id" and isinstance(name.ctx, ast.Load) for name in names)


def test_no_object_is_known_by_its_id():
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (package / import_name(package)).rglob("*.py")
        if asks_for_ids(path.read_text())
    }
    assert found == TOLD_APART_BY_ID, (
        "no dict is keyed by id(): an object that hashes by identity is a key itself, as are "
        "variables and equations of jaxprs and classes with eq=False; alpa_meta.identity has keys "
        "for what has no hash and is not ours"
    )


@pytest.mark.parametrize("source", ["known[id(value)] = 1", "set(map(id, values))"])
def test_a_planted_id_is_found(source):
    assert asks_for_ids(source) and not asks_for_ids("id: str; row.id = one.id(id=2)")


def test_mypy_finds_the_modules_of_every_package_and_of_its_tests():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    folders = [str(package.relative_to(ROOT)) for package in PACKAGES]
    assert settings["mypy_path"] == sorted(
        [*folders, *(f"{one}/tests" for one in folders), "benchmarks", "examples", "tests"]
    )
    sources = {f"{one}/{import_name(ROOT / one)}" for one in folders}
    assert sources <= set(settings["files"])
    (strict,) = (one for one in settings["overrides"] if one.get("disallow_untyped_defs"))
    assert strict["module"] == sorted(f"{import_name(ROOT / one)}.*" for one in folders)


def lint_layers(*roots: Path) -> subprocess.CompletedProcess[str]:
    """Run the layering contracts of the repository on the packages found first under `roots`."""
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as main; main()",
        "--config",
        str(ROOT / "pyproject.toml"),
        "--no-cache",
        "--no-logo",
    ]
    path = os.pathsep.join(map(str, (*roots, *PACKAGES)))
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_sources_keep_the_layering_contracts():
    result = lint_layers()
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("stage_dp", "import cost_model"),
        ("alpa_interchange", "import ilp_sharding"),
        ("mesh_runtime", "def late():\n    import resharding"),
        ("cost_model", "import jax"),
        ("ilp_sharding", "from ray import util"),
    ],
)
def test_an_import_across_the_star_breaks_the_contracts(tmp_path, package, line):
    source = next(path / package for path in PACKAGES if (path / package).is_dir())
    shutil.copytree(source, tmp_path / package)
    (tmp_path / package / "intruder.py").write_text(f'"""Crosses the star."""\n\n{line}\n')
    result = lint_layers(tmp_path)
    assert result.returncode == 1, result.stdout
    assert f"{package}.intruder" in result.stdout


def test_planning_imports_no_jax_and_no_ray():
    light = ["alpa_interchange", "cost_model", "ilp_sharding", "stage_dp", "resharding"]
    program = f"import sys, {', '.join(light)}\nprint({HEAVY!r} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "set()", run.stdout + run.stderr


OPTIONAL = {"equinox", "flax", "matplotlib", "optax", "rich", "typer"}


def test_a_step_runs_without_any_extra():
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
import jax, jax.numpy as jnp
import alpa_meta as alpa
def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - gradient, loss
parallel = alpa.parallelize(step, cluster="host:2", num_stages=1, num_microbatches=1)
parallel(jnp.eye(4), jnp.ones((8, 4)))
print(repr(parallel.plan)[:12], {OPTIONAL!r} & set(sys.modules))
from alpa_meta.cli import run
assert run(["plan"]) == 2
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("set()"), run.stdout
    assert "pip install 'alpa-meta[cli]'" in run.stderr


def test_help_and_versions_need_no_jax():
    program = """
import sys
from alpa_meta.cli import run
assert run(["--help"]) == run(["--version"]) == 0
assert not {"jax", "numpy", "rich"} & set(sys.modules), sorted(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for package in PACKAGES:
        assert f"{project(package)['name']} {project(package)['version']}" in run.stdout


def uv(*arguments: str | Path) -> None:
    """Run the installer; packages it has in its cache are not asked for over the network."""
    found = shutil.which("uv", path=f"{ROOT / '.uv' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("uv is neither in .uv/ nor on PATH: run ./dev setup")
    for offline in ("--offline", "--no-progress"):
        run = subprocess.run([found, *arguments, offline], cwd=ROOT, capture_output=True, text=True)
        if run.returncode == 0:
            return
    raise AssertionError(run.stderr)


@pytest.fixture(scope="module")
def bare_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that was asked for the wheels of ilp-sharding and its schema only."""
    folder = tmp_path_factory.mktemp("bare")
    for package in ("interchange", "ilp-sharding"):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
            cwd=ROOT / "packages" / package,
            check=True,
            capture_output=True,
        )
    wheels = sorted(folder.glob("*.whl"))
    assert [wheel.name.split("-")[0] for wheel in wheels] == ["alpa_interchange", "ilp_sharding"]
    environment = folder / "environment"
    python = environment / "bin" / "python"
    uv("venv", "--quiet", "--python", sys.executable, environment)
    uv("pip", "install", "--python", python, "--constraint", "requirements.txt", *wheels)
    return environment


def run_bare(environment: Path, program: str) -> str:
    # An empty directory, isolated mode: nothing of this checkout can be imported.
    run = subprocess.run(
        [environment / "bin" / "python", "-I", "-c", program],
        cwd=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_ilp_sharding_alone_brings_no_jax_ray_or_cvxpy(bare_environment):
    program = """
import json
from importlib.metadata import distributions
print(json.dumps([d.metadata["Name"].lower() for d in distributions()]))
"""
    installed = set(map(normal, json.loads(run_bare(bare_environment, program))))
    assert {"alpa-interchange", "ilp-sharding", "highspy"} <= installed
    assert installed & HEAVY == set()


def test_ilp_sharding_alone_solves_a_problem(bare_environment):
    # Each node's cheap strategy (1 s) conflicts with the other's (9 s), so one of them pays 2 s;
    # the limit of 5 bytes forbids node 0 its second strategy (6 bytes).
    program = """
import ilp_sharding
from alpa_interchange.selection import ShardingProblem
problem = ShardingProblem(
    num_strategies=[2, 2],
    node_cost=[1.0, 2.0, 1.0, 2.0],
    node_memory=[1.0, 6.0, 1.0, 1.0],
    live=[[0, 1], [0, 1]],
    edges=[[0, 1]],
    edge_cost=[9.0, 0.0, 0.0, 0.0],
    memory_limit=5.0,
)
solution = ilp_sharding.solve(problem)
print(solution.status, tuple(map(int, solution.choice)), float(solution.objective), solution.gap)
"""
    assert run_bare(bare_environment, program).split("\n")[0] == "optimal (0, 1) 3.0 0.0"


def test_ilp_sharding_alone_has_its_command(bare_environment):
    command = [bare_environment / "bin" / "ilp-sharding", "--help"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "solve" in run.stdout


@each_package
def test_every_package_has_the_same_rooms(package):
    source = package / import_name(package)
    for path in (
        *(package / name for name in ("BUILD", "CHANGELOG.md", "LICENSE", "README.md", "tests")),
        source / "__init__.py",
        source / "py.typed",
    ):
        assert path.exists(), f"{path.relative_to(ROOT)} is missing"
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project(package)["requires-python"] == ">=3.11"


@each_package
def test_the_changelog_tells_of_the_version(package):
    text = (package / "CHANGELOG.md").read_text()
    version = project(package)["version"]
    assert re.search(rf"^## \[?({re.escape(version)}|Unreleased)\b", text, re.MULTILINE), text[:200]


@each_package
def test_the_module_opens_with_a_docstring_and_lists_its_names(package):
    tree = ast.parse((package / import_name(package) / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    allowed = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    for node in tree.body:
        types_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        assert types_only or isinstance(node, allowed), ast.unparse(node)


def test_requirements_name_exact_versions_with_hashes_and_no_host():
    text = (ROOT / "requirements.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) > 50
    for entry in entries:
        assert re.match(r"[\w.\[\]-]+==[\w.!+]+", entry), entry[:80]
        assert "--hash=sha256:" in entry, entry[:80]
    assert "://" not in text


def test_no_lock_that_names_hosts_is_committed():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"uv.lock", "pants.lock"} <= set(ignored)


def test_dev_lists_its_commands_and_refuses_others():
    usage = subprocess.run(["./dev", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert usage.returncode == 0
    for command in ("train", "test", "check", "alone", "bench"):
        assert re.search(rf"^  {command}\b", usage.stdout, re.MULTILINE)
    wrong = subprocess.run(["./dev", "trian"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "no command 'trian'" in wrong.stderr


def test_no_package_imports_a_module_that_is_run_by_its_name():
    """Python warns of such a module, whose classes are then there twice."""
    run = [
        ".".join(path.relative_to(package).with_suffix("").parts)
        for package in PACKAGES
        for path in (package / import_name(package)).rglob("*.py")
        if '\nif __name__ == "__main__":' in path.read_text()
    ]
    assert "cost_model.link_fit" in run
    imports = ", ".join({name.partition(".")[0] for name in run})
    code = f"import sys, {imports}; print([name for name in {run} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
