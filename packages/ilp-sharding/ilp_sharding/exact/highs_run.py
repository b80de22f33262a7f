"""One run of HiGHS that returns in time.

HiGHS ends at its time limit only where it looks at the clock; version 1.15 can loop without doing
so in presolve of tiny programs. So under a deadline it runs in a thread of its own (it holds no
Python lock), is told to stop a moment before, and is left to itself if it does not -> run_until().
"""

from __future__ import annotations

import math
import threading
import time

import highspy

from ilp_sharding.exceptions import OutOfTime

_GRACE_SHARE = 0.05  # of the time given, between the limit told to HiGHS and the deadline


def run_until(highs: highspy.Highs, deadline: float) -> bool:
    """Run until `deadline` (a `time.perf_counter()`); return whether it ended by itself.

    Raises OutOfTime if it still runs at `deadline`; nobody may touch it any more then.
    """
    left = deadline - time.perf_counter()
    if left <= 0:
        return False
    if math.isinf(left):
        highs.run()
        return True
    highs.setOptionValue("time_limit", highs.getRunTime() + (1.0 - _GRACE_SHARE) * left)
    thread = threading.Thread(target=highs.run, daemon=True)
    thread.start()
    thread.join(left)
    if thread.is_alive():
        raise OutOfTime
    return bool(highs.getModelStatus() != highspy.HighsModelStatus.kTimeLimit)
