"""Sets what must be in the environment before a test module imports jax."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["ALPA_PLAN_CACHE"] = "0"  # no test takes its plans from an earlier run
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
