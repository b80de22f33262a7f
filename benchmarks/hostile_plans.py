"""Changes a plan 100,000 times and says what became of it.

Usage: python benchmarks/hostile_plans.py [COUNT]

Every change must be refused with one message, or be a plan that is shown, restored as what it says
and, of the first 20, run with the plain step's result. A crash ends it with its traceback.
"""

import os
import resource
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ["ALPA_PLAN_CACHE"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "alpa-meta" / "tests"))

from changed_plans import outcomes, small_plan


def main(count: int) -> None:
    plan = small_plan()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    found, slowest = outcomes(plan, count, seed=1, runs=20)
    seconds = time.process_time() - begun
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    shown = ", ".join(f"{number} {what}" for what, number in found.most_common())
    print(f"{count} changed plans: {shown}; no crash")
    print(f"{seconds:.0f} CPU seconds, the slowest {slowest:.2f}; memory grew by {grown:.0f} MiB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
