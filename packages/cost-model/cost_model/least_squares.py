"""Robust bounded least squares in the logarithms of positive parameters.

Minimises  sum_i w_i^2 rho(f_i(x) - y_i) + sum_j (prior (x_j - x0_j))^2  over log parameters x
within bounds, with Huber's rho (quadratic up to `delta`, linear beyond), by scipy's trust-region
method for bounds (Branch, Coleman and Li 1999). The prior keeps parameters that the data do not
determine at their start.

scipy is imported to fit, not to predict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Function = Callable[[Mapping[str, float]], np.ndarray]


def fit_parameters(
    predict: Function,
    measured: np.ndarray,
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    *,
    weights: np.ndarray | None = None,
    delta: float = 0.12,
    prior: float = 0.1,
    iterations: int = 60,
) -> dict[str, float]:
    """Return the parameters whose `predict` (log seconds [rows]) is nearest to log `measured`."""
    from scipy.optimize import least_squares  # what only predicts does not wait for it

    names = tuple(start)
    first = np.log([start[name] for name in names])
    low = np.array([np.log(bounds[name][0]) if name in bounds else -np.inf for name in names])
    high = np.array([np.log(bounds[name][1]) if name in bounds else np.inf for name in names])
    target = np.log(measured)
    scale = np.ones_like(target) if weights is None else weights

    def residuals(x: np.ndarray) -> np.ndarray:
        # Huber's loss as a residual of its own: scipy's would also flatten the prior
        error = predict(dict(zip(names, np.exp(x).tolist(), strict=True))) - target
        size = np.abs(error)
        tail = np.sign(error) * np.sqrt(np.maximum(2 * delta * size - delta**2, 0.0))
        return np.concatenate([np.where(size < delta, error, tail) * scale, prior * (x - first)])

    found = least_squares(
        residuals, np.clip(first, low + 1e-9, high - 1e-9), bounds=(low, high),
        diff_step=1e-3, ftol=1e-5, max_nfev=iterations,
    )  # fmt: skip
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))
