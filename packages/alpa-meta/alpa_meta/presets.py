"""The named parallelisms, as partition specs of a step's state and batch.

A preset looks only at the names and shapes of leaves, the way such layouts are written by hand.
Optimiser state follows the parameter whose path ends its own. A dim that the axes do not divide
stays whole. Presets are for baselines and for pins; nothing in the planner knows them.

    dp        batch over all axes, everything else replicated
    zero2     dp, optimiser state cut over all axes
    zero3     dp, parameters and optimiser state cut over all axes ("fsdp" is the same)
    megatron  batch over the first axis, weights by Megatron's columns and rows over the last
    2d        megatron, what is left whole of a parameter cut over the first axis as in zero3
    expert    batch over all axes, experts over the last, other parameters replicated
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from alpa_meta.errors import PlanError

PRESETS = ("2d", "dp", "expert", "fsdp", "megatron", "zero2", "zero3")
"""The names `preset_specs` takes."""

_COLUMNS = re.compile(r"\b(query|key|value|qkv)\b")
_WIDE = re.compile(r"\b(up|gate|head)\b")
_ROWS = re.compile(r"\b(out|down)\b")
_TABLES = re.compile(r"\b(embed|embedding|tables)\b")
_EXPERTS = re.compile(r"\b(up|down)\b")


def preset_specs(
    name: str, state: Any, batch: Any, axis_sizes: Mapping[str, int]
) -> tuple[Any, Any]:
    """Return the partition specs of `state` and `batch`, trees of their structure.

    `axis_sizes` are the axes of the mesh; presets with a model axis take the last.
    """
    if name not in PRESETS:
        raise PlanError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    axes = tuple(axis_sizes)
    model = name in ("megatron", "2d")
    batch_axes = axes[:-1] if model and len(axes) > 1 else () if model else axes

    def state_spec(path: Any, leaf: Any) -> PartitionSpec:
        words = re.sub(r"[^A-Za-z0-9]+|_(?=\d)", " ", jax.tree_util.keystr(path))
        is_parameter = words.split()[:1] == ["params"]
        return _state_spec(name, words, is_parameter, tuple(leaf.shape), axes, axis_sizes)

    def batch_spec(leaf: Any) -> PartitionSpec:
        size = math.prod(axis_sizes[axis] for axis in batch_axes)
        cut = leaf.ndim > 0 and leaf.shape[0] % size == 0 and bool(batch_axes)
        return _spec(batch_axes) if cut else _spec()

    return jax.tree_util.tree_map_with_path(state_spec, state), jax.tree.map(batch_spec, batch)


def _state_spec(
    name: str,
    words: str,
    is_parameter: bool,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
) -> PartitionSpec:
    dims: list[tuple[str, ...] | None] = [None] * len(shape)
    cut_axes: tuple[str, ...] = ()
    if words.split()[:1] == ["key"]:
        return _spec(*dims)
    if name in ("megatron", "2d"):
        _cut(dims, shape, _megatron_dim(words, len(shape)), axes[-1:], axis_sizes)
        cut_axes = axes[:-1] if name == "2d" else ()
    elif name == "expert":
        dim = 0 if len(shape) == 3 and _EXPERTS.search(words) else None
        _cut(dims, shape, dim, axes[-1:], axis_sizes)
    elif name in ("zero3", "fsdp") or (name == "zero2" and not is_parameter):
        cut_axes = axes
    if cut_axes:
        _cut(dims, shape, _largest(dims, shape, cut_axes, axis_sizes), cut_axes, axis_sizes)
    return _spec(*dims)


def _spec(*dims: tuple[str, ...] | None) -> PartitionSpec:
    construct: Any = PartitionSpec
    made: PartitionSpec = construct(*dims)
    return made


def _megatron_dim(words: str, num_dims: int) -> int | None:
    """Return the dim (from the end) that tensor parallelism cuts, None if the leaf stays whole."""
    bias = "bias" in words
    if _COLUMNS.search(words):
        heads_apart = num_dims >= (2 if bias else 3)
        return -2 if heads_apart else -1
    if _WIDE.search(words):
        return -1
    if _ROWS.search(words) and not bias:
        return -3 if " out" in words and num_dims >= 3 else -2
    if _TABLES.search(words) and num_dims == 2:
        return -2
    return None


def _largest(
    dims: list[tuple[str, ...] | None],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
) -> int | None:
    """Return the largest whole dim that `axes` divide, the first of equals, else None."""
    size = math.prod(axis_sizes[axis] for axis in axes)
    free = [d for d, s in enumerate(shape) if dims[d] is None and s % size == 0 and s >= size]
    return max(free, key=lambda d: shape[d], default=None)


def _cut(
    dims: list[tuple[str, ...] | None],
    shape: tuple[int, ...],
    dim: int | None,
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
) -> None:
    """Put `axes` on `dim` of a spec, if they divide it."""
    if dim is None or not -len(shape) <= dim < len(shape):
        return
    if shape[dim] % math.prod(axis_sizes[axis] for axis in axes) == 0:
        dims[dim] = axes
