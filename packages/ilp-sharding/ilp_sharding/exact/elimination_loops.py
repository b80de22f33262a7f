"""The sweeps of `elimination`, compiled.

All numbers of an elimination lie in one array: node costs, tables [other node, own], messages. Step
t adds up its node's costs and its terms, tables and messages of earlier steps, each a row over the
node's strategies for every entry of the scope. The terms that do not vary along the last axis of
the scope come first, and are added up once for all of it. `elimination` adds in the same order in
numpy, so both give the same numbers to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

_FAST = {"nnan", "nsz"}  # costs may be infinite; sums keep their order


class Steps(NamedTuple):
    """Where the numbers of every step lie.

    `size`, `axes`, `cost`, `message` [steps]: strategies of the node, nodes in the scope, start of
    the node's costs and of the step's message. `axis_size`, `axis_step` [steps, most axes]: of
    every node in the scope the strategies and the step that removes it. Terms of step t are
    `term[t]:term[t + 1]`, from `varying[t]` on those that vary along the last axis; `start`
    [terms], `stride` [terms, most axes] say where their rows begin.
    """

    size: np.ndarray
    axes: np.ndarray
    cost: np.ndarray
    message: np.ndarray
    axis_size: np.ndarray
    axis_step: np.ndarray
    term: np.ndarray
    varying: np.ndarray
    start: np.ndarray
    stride: np.ndarray


def steps_of(
    order: Sequence[int],
    scopes: Sequence[Sequence[int]],
    sizes: Mapping[int, int],
    terms: Sequence[Sequence[np.ndarray | int]],
) -> tuple[Steps, np.ndarray]:
    """Return where everything lies, and the array with the tables filled in.

    `terms[t]`: tables [scope..., strategies], with axes of size 1, or steps whose message it is.
    """
    position = {node: t for t, node in enumerate(order)}
    size = np.array([sizes[node] for node in order], dtype=np.int64)
    axes = np.array([len(scope) for scope in scopes], dtype=np.int64)
    axis = np.arange(axes.max(initial=0))
    axis_step = np.zeros((len(order), len(axis)), dtype=np.int64)
    axis_step[axis < axes[:, None]] = [position[j] for scope in scopes for j in scope]
    axis_size = np.where(axis < axes[:, None], size[axis_step], 1)
    message = np.cumsum([size.sum(), *axis_size.prod(1)])
    tables: list[np.ndarray] = []
    varying: list[int] = []
    start: list[int] = []
    strides: list[tuple[int, int, int]] = []  # (term, axis, stride)
    end = int(message[-1])
    for t, scope in enumerate(scopes):
        last, first = len(scope) - 1, len(start)
        fixed = 0
        for term in terms[t]:
            if isinstance(term, np.ndarray):
                width = term.shape[-1]
                along = [a for a, n in enumerate(term.shape[:-1]) if n > 1]
                strides += [(len(start), a, width) for a in along]
                start.append(end)
                end += term.size
                tables.append(term.ravel())
            else:
                width, inside = sizes[order[t]], set(scopes[term])
                along = [a for a in range(last, -1, -1) if scope[a] in inside]
                for a in along:
                    strides.append((len(start), a, width))
                    width *= sizes[scope[a]]
                start.append(int(message[term]))
            fixed += last not in along
        varying.append(first + fixed)
    stride = np.zeros((len(start), len(axis)), dtype=np.int64)
    if strides:
        numbers, along_axis, widths = zip(*strides, strict=True)
        stride[numbers, along_axis] = widths
    values = np.empty(end)
    values[message[-1] :] = np.concatenate(tables) if tables else 0.0
    steps = Steps(
        size=size,
        axes=axes,
        cost=np.cumsum(size) - size,
        message=message[:-1],
        axis_size=axis_size,
        axis_step=axis_step,
        term=np.cumsum([0, *map(len, terms)]),
        varying=np.array(varying, dtype=np.int64),
        start=np.array(start, dtype=np.int64),
        stride=stride,
    )
    return steps, values


@njit(cache=True, fastmath=_FAST)
def minimise(steps: Steps, values: np.ndarray, first: int, last: int) -> float:
    """Write the messages of the steps from `first` to `last`; return the sum of those without a
    scope."""
    total = 0.0
    most = steps.size.max()
    fixed, row = np.empty(most), np.empty(most)
    digits = np.zeros(steps.axis_size.shape[1] + 1, np.int64)
    for t in range(first, last):
        size, inner = steps.size[t], steps.axes[t] - 1
        begin, varying, end = steps.term[t], steps.varying[t], steps.term[t + 1]
        place = steps.start[begin:end].copy()
        stride = steps.stride[begin:end]
        constant, count = varying - begin, end - begin
        length, outer = 1, 1
        if inner >= 0:
            length = steps.axis_size[t, inner]
            for axis in range(inner):
                outer *= steps.axis_size[t, axis]
        digits[:] = 0
        out = steps.message[t]
        cost = values[steps.cost[t] : steps.cost[t] + size]
        for _ in range(outer):
            for k in range(size):
                fixed[k] = cost[k]
            for c in range(constant):
                line = values[place[c] : place[c] + size]
                for k in range(size):
                    fixed[k] += line[k]
            for x in range(length):
                least = np.inf
                if constant == count:
                    for k in range(size):
                        least = min(least, fixed[k])
                else:
                    for k in range(size):
                        row[k] = fixed[k]
                    for c in range(constant, count - 1):
                        at = place[c] + x * stride[c, inner]
                        line = values[at : at + size]
                        for k in range(size):
                            row[k] += line[k]
                    at = place[count - 1] + x * stride[count - 1, inner]
                    line = values[at : at + size]
                    for k in range(size):
                        least = min(least, row[k] + line[k])
                values[out] = least
                out += 1
            for axis in range(inner - 1, -1, -1):
                digits[axis] += 1
                turned = digits[axis] == steps.axis_size[t, axis]
                by = 1
                if turned:
                    digits[axis] = 0
                    by = 1 - steps.axis_size[t, axis]
                for c in range(count):
                    place[c] += by * stride[c, axis]
                if not turned:
                    break
        if inner < 0:
            total += values[steps.message[t]]
    return total


@njit(cache=True)
def walk_back(steps: Steps, values: np.ndarray, x: np.ndarray) -> None:
    """Write a minimiser [steps] into `x`, from the messages."""
    row = np.empty(steps.size.max())
    for t in range(len(x) - 1, -1, -1):
        size = steps.size[t]
        for k in range(size):
            row[k] = values[steps.cost[t] + k]
        for c in range(steps.term[t], steps.term[t + 1]):
            at = steps.start[c]
            for axis in range(steps.axes[t]):
                at += steps.stride[c, axis] * x[steps.axis_step[t, axis]]
            for k in range(size):
                row[k] += values[at + k]
        x[t] = np.argmin(row[:size])


def run_sample() -> None:
    """Call every loop, on two nodes."""
    steps, values = steps_of([0, 1], [[1], []], {0: 2, 1: 2}, [[np.zeros((2, 2))], [0]])
    minimise(steps, values, 0, 2)
    walk_back(steps, values, np.zeros(2, np.int64))
