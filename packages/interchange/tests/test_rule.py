"""Sharding rules: parsing, kinds of factors, refusals, strategies."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange.document import from_json, to_json
from alpa_interchange.rule import Factor, ShardingRule, Strategy
from alpa_interchange.tensor import ShardingSpec

SIZES = {"b": 8, "m": 64, "k": 32, "n": 16, "s": 4, "h": 8}


def test_a_factor_that_is_in_no_result_is_summed() -> None:
    rule = ShardingRule.parse("b m k, b k n -> b m n", SIZES)
    assert {factor.name: factor.kind for factor in rule.factors} == {
        "b": "parallel",
        "m": "parallel",
        "k": "reduction",
        "n": "parallel",
    }
    assert rule.factor("k").reduction == "add"
    assert rule.factor("k").size == 32


def test_a_dim_may_be_a_product_of_factors_or_of_none() -> None:
    rule = ShardingRule.parse("(b s) h 1 -> b s h _", SIZES)
    assert rule.operands == ((("b", "s"), ("h",), ()),)
    assert rule.results == ((("b",), ("s",), ("h",), ()),)


def test_kinds_are_given_by_name() -> None:
    rule = ShardingRule.parse(
        "b s h -> b s", SIZES, reductions={"h": "max"}, permutations=("s",), replicated=("b",)
    )
    kinds = {factor.name: (factor.kind, factor.reduction) for factor in rule.factors}
    assert kinds == {
        "b": ("replicate", "add"),
        "s": ("permutation", "add"),
        "h": ("reduction", "max"),
    }


def test_an_operator_may_take_nothing() -> None:
    assert ShardingRule.parse(" -> b s", SIZES).operands == ()


@pytest.mark.parametrize(
    "text", ["b m k, b k n -> b m n", "(b s) h 1 -> b s h 1", "b, b -> 1, b", "-> b"]
)
def test_a_rule_is_shown_as_it_was_written(text: str) -> None:
    rule = ShardingRule.parse(text, SIZES)
    assert str(rule).strip() == text
    assert ShardingRule.parse(str(rule), SIZES) == rule


@pytest.mark.parametrize("text", ["b m", "b -> m -> b", ""])
def test_a_rule_needs_one_arrow(text: str) -> None:
    with pytest.raises(ValueError, match="one '->'"):
        ShardingRule.parse(text, SIZES)


def test_a_factor_without_size_is_refused() -> None:
    with pytest.raises(ValueError, match="no size given for factor 'q'"):
        ShardingRule.parse("q -> q", SIZES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "Factor.name must not be empty"),
        ({"size": 0}, "Factor.size must be above 0"),
        ({"kind": "sideways"}, "Factor.kind must be one of"),
        ({"reduction": "mean"}, "Factor.reduction must be one of"),
    ],
)
def test_impossible_factors_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Factor(**{"name": "b", "size": 2, **changes})


def test_a_rule_may_use_declared_factors_only() -> None:
    with pytest.raises(ValueError, match="uses factor 'q', which is not declared"):
        ShardingRule(factors=(Factor(name="b", size=2),), operands=((("q",),),), results=())


def test_a_strategy_knows_the_axes_of_its_factors() -> None:
    spec = ShardingSpec((("x", "y"), ()))
    strategy = Strategy(assignment=(("b", ("x", "y")),), operands=(spec,), results=(spec,))
    assert strategy.axes("b") == ("x", "y")
    assert strategy.axes("k") == ()
    assert str(strategy) == "b:x+y"
    assert str(Strategy(assignment=(), operands=(), results=())) == "replicated"
    assert from_json(to_json(strategy), Strategy) == strategy


NAMES = st.lists(st.sampled_from(sorted(SIZES)), unique=True, max_size=4)


@settings(max_examples=60, derandomize=True)
@given(NAMES, NAMES, NAMES)
def test_every_rule_survives_text_and_json(
    first: list[str], second: list[str], result: list[str]
) -> None:
    def dims(names: list[str]) -> str:
        return " ".join(names) or "1"

    text = f"{dims(first)}, {dims(second)} -> {dims(result)}"
    rule = ShardingRule.parse(text, SIZES)
    assert str(rule) == text
    assert from_json(to_json(rule), ShardingRule) == rule
