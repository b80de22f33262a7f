"""Sets what must be in the environment before a test module imports jax or ray."""

import atexit
import os
import shutil
import tempfile

XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Programs that run once are not worth LLVM's optimisations.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # Nor worth the newer code generator of fusions, which lowers each by MLIR whatever the level:
    # spmd/test_evaluation.py takes 11.4 CPU s and 0.5 GB without it, 28.9 CPU s and 1.0 GB with it.
    # XLA's passes, and with them the compiled text and memory that tests look at, are the same.
    "--xla_cpu_use_fusion_emitters=false",
)

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
