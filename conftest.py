"""Sets what must be in the environment before a test module imports jax or ray."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["ALPA_PLAN_CACHE"] = "0"  # no test takes its plans from an earlier run
# Eight devices; programs that run once are not worth LLVM's optimisations.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
