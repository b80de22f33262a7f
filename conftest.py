"""Sets what must be in the environment before a test module imports jax or ray."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["ALPA_PLAN_CACHE"] = "0"  # no test takes its plans from an earlier run
# Eight devices; programs that run once are not worth LLVM's optimisations.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Profiles that the user calibrated and plans the user keeps must not change what tests find. One
# folder for the whole run: workers and subprocesses inherit it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["ALPA_CACHE_DIR"] = tempfile.mkdtemp(prefix="alpa-tests-")
    atexit.register(shutil.rmtree, os.environ["ALPA_CACHE_DIR"], ignore_errors=True)
