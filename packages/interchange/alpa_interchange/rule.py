"""Sharding rules: an operator as named factors, in the manner of einsum.

`"b m k, b k n -> b m n"` says what a batched matmul does with its dims. A dim may be a product of
factors, major to minor, as in the reshape `"(b s) h -> b s h"`; `1` (or `_`) is a dim with no
factor, which is never sharded. Factors are of four kinds:

    parallel     devices along it work alone on their part
    reduction    sharding it leaves partial results to be combined (add, max, min, ...)
    permutation  sharding it needs a collective inside the operator (halo exchange, ring)
    replicate    never sharded; the operator needs the whole of it (sort, fft)

From a rule alone one generic function enumerates all strategies of an operator; a new operator is
one line. (Shardy's factor-based propagation rules are the same idea.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import field, frozen

from alpa_interchange.check import OneOf, non_empty, positive
from alpa_interchange.tensor import ShardingSpec

FACTOR_KINDS = ("parallel", "reduction", "permutation", "replicate")
REDUCTIONS = ("add", "max", "min", "and", "or", "mul")


@frozen(kw_only=True, cache_hash=True)
class Factor:
    """One named index of an operator, with its size and what sharding it entails."""

    name: str = field(validator=non_empty)
    size: int = field(validator=positive)
    kind: str = field(default="parallel", validator=OneOf(*FACTOR_KINDS))
    reduction: str = field(
        default="add", validator=OneOf(*REDUCTIONS)
    )  # how partial results combine, for kind "reduction"
    halo: int = 0  # elements along the factor that neighbours exchange, for kind "permutation"


@frozen(kw_only=True, cache_hash=True)
class ShardingRule:
    """Factors of an operator and, per operand and result, the factors of each dim (major first)."""

    factors: tuple[Factor, ...]
    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]

    def __attrs_post_init__(self) -> None:
        known = {factor.name for factor in self.factors}
        for dims in self.operands + self.results:
            for dim in dims:
                for name in dim:
                    if name not in known:
                        raise ValueError(
                            f"ShardingRule uses factor {name!r}, which is not declared"
                        )

    def factor(self, name: str) -> Factor:
        """Return the factor called `name`."""
        return next(factor for factor in self.factors if factor.name == name)

    def __str__(self) -> str:
        def show(dims: tuple[tuple[str, ...], ...]) -> str:
            return " ".join(
                "1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})"
                for dim in dims
            )

        return f"{', '.join(map(show, self.operands))} -> {', '.join(map(show, self.results))}"

    @staticmethod
    def parse(
        text: str,
        sizes: Mapping[str, int],
        *,
        reductions: Mapping[str, str] | None = None,
        permutations: tuple[str, ...] = (),
        replicated: tuple[str, ...] = (),
    ) -> ShardingRule:
        """Return the rule written as `text`, e.g. `"b m k, b k n -> b m n"`.

        `sizes` gives the size of each factor. Factors that appear in no result are reductions by
        "add" unless `reductions` names another combination.
        """
        if text.count("->") != 1:
            raise ValueError(f"a sharding rule has one '->', got {text!r}")
        left, right = text.split("->")
        operands, results = _tensors(left), _tensors(right)
        in_results = {name for dims in results for dim in dims for name in dim}
        names = list(dict.fromkeys(n for dims in operands + results for dim in dims for n in dim))
        factors = []
        for name in names:
            if name not in sizes:
                raise ValueError(f"rule {text!r}: no size given for factor {name!r}")
            kind, reduction = "parallel", "add"
            if name in replicated:
                kind = "replicate"
            elif name in permutations:
                kind = "permutation"
            elif reductions and name in reductions:
                kind, reduction = "reduction", reductions[name]
            elif name not in in_results:
                kind = "reduction"
            factors.append(Factor(name=name, size=sizes[name], kind=kind, reduction=reduction))
        return ShardingRule(factors=tuple(factors), operands=operands, results=results)


def _tensors(text: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    if not text.strip():
        return ()
    return tuple(_dims(part) for part in text.split(","))


def _dims(text: str) -> tuple[tuple[str, ...], ...]:
    dims: list[tuple[str, ...]] = []
    for group, single in re.findall(r"\(([^()]*)\)|([^\s()]+)", text):
        names = group.split() if not single else ([] if single in ("1", "_") else [single])
        dims.append(tuple(names))
    return tuple(dims)


@frozen(kw_only=True, cache_hash=True)
class Strategy:
    """One way to run an operator on a mesh.

    `assignment` pairs factors with the mesh axes (major first) that shard them, sorted by factor.
    `results` are the specs after partial sums were completed: an axis of a sharded reduction factor
    is on a dim (reduce-scatter), in `partial` (left unreduced) or nowhere (all-reduce).
    """

    assignment: tuple[tuple[str, tuple[str, ...]], ...]
    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]

    def axes(self, factor: str) -> tuple[str, ...]:
        """Return the mesh axes that shard `factor`."""
        return dict(self.assignment).get(factor, ())

    def __str__(self) -> str:
        return ", ".join(f"{f}:{'+'.join(a)}" for f, a in self.assignment) or "replicated"
