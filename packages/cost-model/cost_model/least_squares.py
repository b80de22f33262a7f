"""Robust bounded least squares in the logarithms of positive parameters.

Minimises  sum_i w_i^2 rho(f_i(x) - y_i) + sum_j (prior (x_j - x0_j))^2  over log parameters x
within bounds, with Huber's rho (quadratic up to `delta`, linear beyond), by Levenberg-Marquardt
with an active set for the bounds. The prior keeps parameters that the data do not determine at
their start.
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
    names = tuple(start)
    first = np.log([start[name] for name in names])
    low = np.array([np.log(bounds[name][0]) if name in bounds else -np.inf for name in names])
    high = np.array([np.log(bounds[name][1]) if name in bounds else np.inf for name in names])
    target = np.log(measured)
    scale = np.ones_like(target) if weights is None else weights

    def residuals(x: np.ndarray) -> np.ndarray:
        error = predict(dict(zip(names, np.exp(x).tolist(), strict=True))) - target
        size = np.abs(error)
        tail = np.sign(error) * np.sqrt(np.maximum(2 * delta * size - delta**2, 0.0))
        return np.concatenate([np.where(size < delta, error, tail) * scale, prior * (x - first)])

    x = np.clip(first, low, high)
    damping, residual = 1e-2, residuals(x)
    for _ in range(iterations):
        jacobian = np.empty((len(residual), len(x)))
        for index in range(len(x)):
            step = 1e-3 if x[index] + 1e-3 <= high[index] else -1e-3
            moved = x.copy()
            moved[index] += step
            jacobian[:, index] = (residuals(moved) - residual) / step
        gradient = jacobian.T @ residual
        stopped = ((x >= high - 1e-9) & (gradient < 0)) | ((x <= low + 1e-9) & (gradient > 0))
        free = np.flatnonzero(~stopped)
        gain = 0.0
        while damping < 1e8 and len(free):
            normal = (jacobian.T @ jacobian)[np.ix_(free, free)] + damping * np.eye(len(free))
            move = np.zeros(len(x))
            move[free] = np.clip(np.linalg.solve(normal, -gradient[free]), -0.4, 0.4)
            moved = np.clip(x + move, low, high)
            new = residuals(moved)
            if new @ new < residual @ residual:
                gain = 1 - (new @ new) / (residual @ residual)
                x, residual, damping = moved, new, max(damping / 3, 1e-6)
                break
            damping *= 4
        if gain < 1e-5:
            break
    return dict(zip(names, np.exp(x).tolist(), strict=True))
