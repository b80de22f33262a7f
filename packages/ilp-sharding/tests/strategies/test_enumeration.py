"""Strategies from sharding rules: all assignments of axes to factors, completions of sums."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange import LogicalMesh, MeshAxis, ShardingRule, ShardingSpec
from ilp_sharding.strategies.enumeration import (
    StrategyOptions,
    completed_specs,
    enumerate_strategies,
    natural_strategies,
    shardable_factors,
)

ONE = LogicalMesh(axes=(MeshAxis(name="x", size=2),))
TWO = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=4)))
MATMUL = ShardingRule.parse("m k, k n -> m n", {"m": 8, "k": 8, "n": 8})
WHOLE = ShardingSpec(((), ()))


def specs(strategy):
    return [str(spec) for spec in (*strategy.operands, *strategy.results)]


def test_a_matmul_on_one_axis_splits_rows_columns_or_the_sum():
    found = [specs(strategy) for strategy in natural_strategies(MATMUL, ONE)]
    assert found == [
        ["[·, ·]", "[·, ·]", "[·, ·]"],
        ["[x, ·]", "[·, ·]", "[x, ·]"],
        ["[·, x]", "[x, ·]", "[·, ·] partial(x)"],
        ["[·, ·]", "[·, x]", "[·, x]"],
    ]


def test_on_two_axes_every_pair_of_choices_is_a_strategy():
    assert len(natural_strategies(MATMUL, TWO)) == 4 * 4
    assert len(set(natural_strategies(MATMUL, TWO))) == 16


def test_the_replicated_strategy_comes_first():
    for rule in (MATMUL, ShardingRule.parse("a b -> b a", {"a": 2, "b": 3})):
        assert natural_strategies(rule, TWO)[0].assignment == ()
        assert enumerate_strategies(rule, TWO)[0].assignment == ()


def test_axes_that_do_not_divide_a_factor_do_not_shard_it():
    rule = ShardingRule.parse("a b -> a b", {"a": 6, "b": 8})
    assigned = {(name, axes) for s in natural_strategies(rule, TWO) for name, axes in s.assignment}
    assert ("a", ("x",)) in assigned
    assert ("a", ("y",)) not in assigned
    assert ("b", ("x", "y")) in assigned
    assert ("a", ("x", "y")) not in assigned


def test_axes_of_size_one_are_never_used():
    mesh = LogicalMesh(axes=(MeshAxis(name="x", size=1),))
    assert [s.assignment for s in natural_strategies(MATMUL, mesh)] == [()]


def test_only_leading_factors_of_merged_dims_are_sharded():
    rule = ShardingRule.parse("(b s) h -> b s h", {"b": 2, "s": 4, "h": 8})
    assert shardable_factors(rule) == ("b", "h")
    single = ShardingRule.parse("(b s) h -> b s h", {"b": 1, "s": 4, "h": 8})
    assert shardable_factors(single) == ("s", "h")


def test_factors_that_must_be_whole_are_not_sharded():
    rule = ShardingRule.parse("a b -> a b", {"a": 8, "b": 8}, replicated=("b",))
    assert shardable_factors(rule) == ("a",)


def test_a_sum_is_all_reduced_scattered_onto_a_dim_or_left():
    partial = ShardingSpec(((), ("y",)), ("x",))
    found = completed_specs(partial, (8, 8), TWO, partial_allowed=False)
    assert [str(spec) for spec in found] == ["[·, y]", "[x, y]", "[·, y+x]"]
    left = completed_specs(partial, (8, 8), TWO, partial_allowed=True)
    assert set(left) - set(found) == {partial}


def test_a_sum_is_not_scattered_onto_a_dim_that_it_does_not_divide():
    partial = ShardingSpec(((), ()), ("x",))
    found = completed_specs(partial, (3, 8), TWO, partial_allowed=False)
    assert [str(spec) for spec in found] == ["[·, ·]", "[·, x]"]


def test_complete_strategies_hold_no_partial_sums_unless_they_may_stay():
    plain = enumerate_strategies(MATMUL, TWO)
    assert not any(s.results[0].partial for s in plain)
    free = enumerate_strategies(MATMUL, TWO, StrategyOptions(partial_results=(True,)))
    assert set(plain) < set(free)
    assert any(s.results[0].partial == ("x", "y") for s in free)


def test_sums_pass_unreduced_through_linear_operators():
    rule = ShardingRule.parse("a b -> b a", {"a": 8, "b": 8})
    options = StrategyOptions(partial_results=(True,), pass_partial=True)
    passing = [s for s in enumerate_strategies(rule, ONE, options) if s.operands[0].partial]
    assert [specs(strategy) for strategy in passing] == [["[·, ·] partial(x)", "[·, ·] partial(x)"]]


def test_a_maximum_is_never_left_partial():
    rule = ShardingRule.parse("a b -> a", {"a": 8, "b": 8}, reductions={"b": "max"})
    assert all(not s.results[0].partial for s in natural_strategies(rule, TWO))
    assert any(s.axes("b") for s in natural_strategies(rule, TWO))


def test_an_operator_of_several_results_completes_its_sums():
    rule = ShardingRule.parse("a b -> a, a", {"a": 8, "b": 8})
    found = enumerate_strategies(rule, TWO)
    assert any(strategy.axes("b") for strategy in found)
    for strategy in found:
        assert not any(spec.partial for spec in strategy.results)


SIZES = {"a": 2, "b": 6, "c": 8, "d": 1}
DIMS = st.lists(st.sampled_from(sorted(SIZES)), unique=True, max_size=3)


@settings(max_examples=60, derandomize=True)
@given(DIMS, DIMS, DIMS)
def test_every_assignment_that_divides_is_found_and_no_other(first, second, result):
    rule = ShardingRule.parse(
        f"{' '.join(first) or '1'}, {' '.join(second) or '1'} -> {' '.join(result) or '1'}", SIZES
    )
    factors = [factor.name for factor in rule.factors if factor.size > 1]
    expected = set()
    for x, y in itertools.product([None, *factors], repeat=2):
        share: dict[str, list[tuple[str, int]]] = {}
        for axis, name, size in (("x", x, 2), ("y", y, 4)):
            if name is not None:
                share.setdefault(name, []).append((axis, size))
        sizes = {name: [size for _, size in axes] for name, axes in share.items()}
        if all(
            SIZES[name] % (parts[0] * parts[-1] if len(parts) > 1 else parts[0]) == 0
            for name, parts in sizes.items()
        ):
            expected.add(
                tuple(sorted((name, tuple(a for a, _ in axes)) for name, axes in share.items()))
            )
    assert {s.assignment for s in natural_strategies(rule, TWO)} == expected


@pytest.mark.parametrize("rank", [1, 2])
def test_the_local_parts_of_a_strategy_multiply_to_the_whole(rank):
    names = "ab"[:rank]
    rule = ShardingRule.parse(f"{' '.join(names)} -> {' '.join(names)}", {"a": 8, "b": 8})
    for strategy in natural_strategies(rule, TWO):
        shards = TWO.size(tuple(axis for dim in strategy.results[0].dims for axis in dim))
        assert 8**rank % shards == 0
