"""The highest point below planes: the next prices of a bound that is raised by cutting planes
(Kelley 1960)."""

from __future__ import annotations

import math

import highspy
import numpy as np

from ilp_sharding.exact.highs_run import run_until
from ilp_sharding.exceptions import OutOfTime


def highest_point(
    heights: np.ndarray,
    slopes: np.ndarray,
    most: float,
    ceiling: float = math.inf,
    until: float = math.inf,
) -> tuple[float, np.ndarray]:
    """Return (h, p [prices]) of the largest h <= `ceiling` with h <= heights + slopes @ p at every
    plane and 0 <= p <= `most`.

    `heights` [planes] and `slopes` [planes, prices] are best of about size one. Raises OutOfTime
    if a `time.perf_counter()` of `until` comes first.
    """
    num_planes, num_prices = slopes.shape
    width = num_prices + 1
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = width, num_planes
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_ = np.eye(1, width)[0]
    lp.col_lower_ = np.concatenate([[-highspy.kHighsInf], np.zeros(num_prices)])
    lp.col_upper_ = np.concatenate([[min(ceiling, highspy.kHighsInf)], np.full(num_prices, most)])
    lp.row_lower_ = np.full(num_planes, -highspy.kHighsInf)
    lp.row_upper_ = heights
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.arange(0, width * num_planes + 1, width, dtype=np.int32)
    lp.a_matrix_.index_ = np.tile(np.arange(width, dtype=np.int32), num_planes)
    lp.a_matrix_.value_ = np.column_stack([np.ones(num_planes), -slopes]).ravel()
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.passModel(lp)
    if not run_until(highs, until):
        raise OutOfTime
    point = np.asarray(highs.getSolution().col_value)
    return float(point[0]), np.clip(point[1:], 0.0, most)
