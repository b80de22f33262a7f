"""Tensors of equal form shown together: repeated layers, and optimiser state beside parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import frozen

from alpa_interchange import ShardingSpec

_KEY = re.compile(r"\.([A-Za-z_]\w*)|\[(['\"])(.*?)\2\]|\[(-?\d+)\]|([A-Za-z_]\w*)")
_NUMBER = re.compile(r"\d+")


@frozen
class TensorClass:
    """Tensors with one shape, dtype and sharding spec whose paths differ in numbers only.

    `name` is the path of the parameter, "layer_{0-3}.up.kernel"; `members` what lies so: the
    containers that hold such a tensor, "params, mu, nu"; `count` how many tensors that are.
    """

    name: str
    members: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    spec: ShardingSpec
    count: int


def classify_tensors(
    tensors: Sequence[tuple[str, tuple[int, ...], str]], specs: Mapping[str, ShardingSpec]
) -> tuple[TensorClass, ...]:
    """Return the classes of `tensors`, each (path, shape, dtype); those of one name together.

    The name of a tensor is the longest end of its path that it shares with a tensor of the same
    shape in another container: `state.opt_state[0].mu['w']` and `state.params['w']` are both "w".
    """
    keys = {path: _keys(path) for path, _, _ in tensors}
    patterns: dict[tuple[object, ...], set[str]] = {}
    for path, shape, _ in tensors:
        for start in range(1, len(keys[path])):
            patterns.setdefault((keys[path][start:], shape), set()).add(_NUMBER.sub("#", path))
    groups: dict[tuple[object, ...], list[tuple[str, tuple[str, ...]]]] = {}
    for path, shape, dtype in tensors:
        ends = (keys[path][start:] for start in range(2, len(keys[path])))
        shared = (end for end in ends if len(patterns[end, shape]) > 1)
        tail = next(shared, keys[path][1:] or keys[path])
        container = keys[path][: len(keys[path]) - len(tail)]
        member = next((key for key in reversed(container) if not key.isdecimal()), "state")
        pattern = ".".join(_NUMBER.sub("#", key) for key in tail)
        groups.setdefault((pattern, shape, dtype, specs[path]), []).append((member, tail))
    first: dict[object, int] = {}
    for group in groups:
        first.setdefault(group[0], len(first))
    return tuple(
        TensorClass(
            name=_named(str(pattern), [tail for _, tail in found]),
            members=tuple(dict.fromkeys(member for member, _ in found)),
            shape=shape,  # type: ignore[arg-type]
            dtype=str(dtype),
            spec=spec,  # type: ignore[arg-type]
            count=len(found),
        )
        for (pattern, shape, dtype, spec), found in sorted(
            groups.items(), key=lambda item: first[item[0][0]]
        )
    )


def classify_activations(
    specs: Mapping[str, ShardingSpec],
) -> tuple[tuple[str, ShardingSpec, int], ...]:
    """Return (name, spec, count) of activations whose names differ in the numbers of a scope only.

    A name is "scope operator[shape]"; the numbers of the shape are kept apart.
    """
    groups: dict[tuple[str, str, ShardingSpec], list[tuple[str, ...]]] = {}
    for name, spec in specs.items():
        scope, _, rest = name.partition(" ")
        key = (_NUMBER.sub("#", scope), rest, spec)
        groups.setdefault(key, []).append((scope,))
    return tuple(
        (f"{_named(pattern, scopes)} {rest}".strip(), spec, len(scopes))
        for (pattern, rest, spec), scopes in groups.items()
    )


def _keys(path: str) -> tuple[str, ...]:
    """Return the keys of a path: "state.params['w'][0]" gives ("state", "params", "w", "0")."""
    return tuple(
        next(group for group in (match[1], match[3], match[4], match[5]) if group is not None)
        for match in _KEY.finditer(path)
    )


def _named(pattern: str, tails: Sequence[tuple[str, ...]]) -> str:
    """Return `pattern` with each # replaced by the numbers found there, "{0-3}" for several."""
    numbers = [_NUMBER.findall(".".join(tail)) for tail in tails]
    name = pattern
    for place in zip(*numbers, strict=True):
        values = sorted({int(number) for number in place})
        name = name.replace("#", _range_text(values), 1)
    return name


def _range_text(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}-{values[-1]}}}"
    return "{" + ",".join(map(str, values)) + "}"
