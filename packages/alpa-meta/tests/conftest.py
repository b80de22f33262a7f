"""Sets what must be in the environment before a test module imports jax."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["ALPA_PLAN_CACHE"] = "0"  # no test takes its plans from an earlier run
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # programs that run once are not worth LLVM's optimisations
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    os.environ["XLA_FLAGS"] = flags.strip()
