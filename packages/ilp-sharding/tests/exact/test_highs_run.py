import threading
import time

import highspy
import numpy as np
import pytest

from ilp_sharding.exact.highs_run import run_until
from ilp_sharding.exceptions import OutOfTime


class _Endless:
    """Looks like HiGHS, and does not look at its clock until it may end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def getRunTime(self) -> float:
        return 0.0

    def setOptionValue(self, name: str, value: float) -> None:
        pass

    def run(self) -> None:
        self.may_end.wait(600)

    def getModelStatus(self) -> highspy.HighsModelStatus:
        return highspy.HighsModelStatus.kOptimal


def _program():
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = 1, 0
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = np.ones(1), np.ones(1), np.full(1, 2.0)
    highs.passModel(lp)
    return highs


@pytest.mark.parametrize("deadline", [np.inf, 60.0])
def test_a_program_that_ends_by_itself_says_so(deadline):
    highs = _program()
    assert run_until(highs, time.perf_counter() + deadline)
    assert highs.getObjectiveValue() == 1.0


def test_nothing_runs_after_the_deadline():
    assert run_until(_program(), time.perf_counter()) is False


def test_a_program_that_passes_its_limit_is_left_behind():
    program = _Endless()
    with pytest.raises(OutOfTime):
        run_until(program, time.perf_counter() + 0.05)  # type: ignore[arg-type]  # as HiGHS
    program.may_end.set()
