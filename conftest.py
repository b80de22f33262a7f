"""Sets what must be in the environment before a test module imports jax or ray."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
