"""What every test runs under: the environment, how much of it runs, how much memory it keeps."""

import atexit
import ctypes
import gc
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

XLA_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    # Programs that run once are not worth LLVM's optimisations.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # One LLVM module for each program: a step of the GPT compiles in 0.68 CPU s, in 0.86 in parts.
    "--xla_cpu_parallel_codegen_split_count=1",
]
with suppress(PackageNotFoundError):  # tests of some packages do without
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 12):
        # Nor worth the newer code generator of fusions, which lowers each by MLIR whatever the
        # level: spmd/test_evaluation.py takes 11.4 CPU s and 0.5 GB without it, 28.9 CPU s and
        # 1.0 GB with it. XLA's passes, and with them the compiled text and memory that tests look
        # at, are the same. From 0.12 on it is the only one, and a flag that XLA does not know ends
        # the process.
        XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["ALPA_PLAN_CACHE"] = "0"  # no test takes its plans from an earlier run
given = os.environ.get("XLA_FLAGS", "")
missing = [flag for flag in XLA_FLAGS if flag.partition("=")[0] not in given]
os.environ["XLA_FLAGS"] = " ".join([*given.split(), *missing])
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Profiles that the user calibrated and plans the user keeps must not change what tests find. One
# folder for the whole run: workers and subprocesses inherit it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["ALPA_CACHE_DIR"] = tempfile.mkdtemp(prefix="alpa-tests-")
    atexit.register(shutil.rmtree, os.environ["ALPA_CACHE_DIR"], ignore_errors=True)
    # One profile of hosts for the whole run: with one that a busy machine measured, the README's
    # example had two stages in place of one.
    with suppress(ImportError):  # tests of some packages do without
        from cost_model import store_profile
        from cost_model.host import default_host_profile

        store_profile(default_host_profile())


def programs_folder() -> Path:
    """Return where compiled programs of processors like this one are kept, for all processes."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
        name = hashlib.sha256("\n".join(sorted(told)).encode()).hexdigest()[:16]
        return Path(__file__).resolve().parent / ".cache" / "programs" / name
    return Path(os.environ["ALPA_CACHE_DIR"]) / "programs"


# JAX finds a program there by its text, its flags and XLA's version. The second run of
# tests/test_parallel_planning.py and test_microbatches.py takes 9.5 CPU s in place of 13.5, the
# first 13.8; their 203 programs take 1.6 MB.
MOST_PROGRAM_BYTES = 1 << 30
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = programs_folder()
    if folder.is_dir() and sum(f.stat().st_size for f in folder.iterdir()) > MOST_PROGRAM_BYTES:
        shutil.rmtree(folder, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run all seeds and examples, not a sample of them"
    )


def pytest_configure(config: pytest.Config) -> None:
    with suppress(ImportError):  # tests of some packages do without
        from hypothesis import settings

        # Tests that name no number of examples are those that compile each of them.
        # None has a deadline: they are claims of what is computed, on however busy a machine.
        settings.register_profile("sample", max_examples=8, deadline=None)
        settings.register_profile("full", max_examples=100, deadline=None)
        settings.load_profile("full" if config.getoption("full") else "sample")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as `bulk` the cases beyond a test's sample; leave out `bulk` unless all are asked for.

    Tests that wait for clusters come first: the worker that begins with them leaves its processor
    to the others meanwhile, and no worker is left waiting at the end.
    """
    kept, bulk = [], []
    values: dict[tuple[str, str], list[object]] = {}  # of (test, parameter), in their order
    places: dict[pytest.Item, dict[str, int]] = {}
    for item in items:
        places[item] = {}
        for mark in item.iter_markers("sample"):
            for name in (*mark.args, *mark.kwargs):
                seen = values.setdefault((item.nodeid.partition("[")[0], name), [])
                assert isinstance(item, pytest.Function)
                value = item.callspec.params[name]
                if value not in seen:
                    seen.append(value)
                places[item][name] = seen.index(value)
    for item in items:
        test, place = item.nodeid.partition("[")[0], places[item]
        is_bulk = item.get_closest_marker("bulk") is not None
        for mark in item.iter_markers("sample"):
            is_bulk |= any(place[name] >= size for name, size in mark.kwargs.items())
            if mark.args:
                fewest = min(len(values[test, name]) for name in mark.args)
                is_bulk |= len({place[name] % fewest for name in mark.args}) > 1
        if is_bulk:
            item.add_marker("bulk")
            bulk.append(item)
        else:
            kept.append(item)
    if bulk and not config.getoption("full"):
        config.hook.pytest_deselected(items=bulk)
        items[:] = kept
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import tests without collecting garbage: 4.3 of the 21.3 CPU s that each worker takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Let the collector of garbage look at what tests make, not at what was imported.

    tests/test_parallel_models.py and test_microbatches.py: 2.5 of 47 CPU s in place of 5.9 of 49,
    in the same memory.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


MOST_BYTES = 1.3e9
"""Of a process, before it forgets the programs it knows, which takes 1.2 CPU s and leaves 0.8 GB.
Where only JAX's caches forgot, a process kept 1.35 GB after alpa-meta's tests up to test_cut.py,
and every file after it forgot again, for nothing: 155 CPU s of the suite. A file takes 0.7 GB at
most (test_public_programs.py), so that none comes to have 2 GB."""

OWN = {path.parent.name for path in Path(__file__).parent.glob("packages/*/*/__init__.py")}


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Give memory back between files: JAX and our caches keep programs until they are told."""
    if (nextitem is None or nextitem.path != item.path) and resident_bytes() > MOST_BYTES:
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
            for value in list(vars(sys.modules[name]).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
        gc.collect()
        with suppress(OSError, AttributeError):  # glibc's only
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds, 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
