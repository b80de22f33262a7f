import numpy as np
import pytest

from cost_model.least_squares import fit_parameters

SIZES = np.array([1.0, 10.0, 100.0, 1000.0, 10000.0])


def line(values):
    return np.log(values["latency"] + SIZES / values["bandwidth"])


START = {"latency": 1.0, "bandwidth": 1.0}


def test_the_parameters_that_made_the_data_are_found():
    found = fit_parameters(line, 5.0 + SIZES / 20.0, START, {}, prior=1e-4)
    assert found == pytest.approx({"latency": 5.0, "bandwidth": 20.0}, rel=1e-2)


def test_one_wrong_row_does_not_pull_the_fit():
    measured = 5.0 + SIZES / 20.0
    measured[2] *= 10
    found = fit_parameters(line, measured, START, {}, prior=1e-4, delta=0.05)
    assert found["latency"] == pytest.approx(5.0, rel=0.15)


def test_bounds_hold():
    bounds = {"latency": (0.1, 3.0)}
    found = fit_parameters(line, 5.0 + SIZES / 20.0, START, bounds, prior=1e-4)
    assert found["latency"] == pytest.approx(3.0)


def test_what_the_data_do_not_say_stays_where_it_was():
    start = START | {"unused": 7.0}
    assert fit_parameters(line, 5.0 + SIZES / 20.0, start, {})["unused"] == pytest.approx(7.0)
