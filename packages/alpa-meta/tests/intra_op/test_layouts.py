import itertools

import pytest

from alpa_interchange import LogicalMesh, MeshAxis, ShardingRule, ShardingSpec, Strategy
from alpa_meta.intra_op.layouts import layouts_of
from ilp_sharding.strategies import completed_specs, natural_strategies, sharding_specs

SHAPES = ((2, 3), (4,), (6, 1, 2), (4, 4), (2, 8))
SIZES = (1, 2, 3, 5, 6, 8, 12, 16, 24)


def mesh(shape, bandwidth=1e9):
    axes = (MeshAxis(name=f"a{k}", size=n, bandwidth=bandwidth) for k, n in enumerate(shape))
    return LogicalMesh(axes=tuple(axes))


@pytest.mark.parametrize("shape", SHAPES)
def test_specs_are_those_of_the_tensor_itself(shape):
    where = mesh(shape)
    for dims in itertools.product(SIZES, repeat=2):
        assert layouts_of(where).specs(dims) == sharding_specs(dims, where)


@pytest.mark.parametrize("shape", SHAPES)
def test_strategies_are_those_of_the_rule_itself(shape):
    where = mesh(shape)
    for b, s, k in itertools.product(SIZES, repeat=3):
        rule = ShardingRule.parse("(b s) k, k 1 -> (b s) 1", {"b": b, "s": s, "k": k})
        assert layouts_of(where).strategies(rule) == natural_strategies(rule, where)


@pytest.mark.parametrize("shape", SHAPES)
def test_completions_are_those_of_the_tensor_itself(shape):
    where = mesh(shape)
    layouts = layouts_of(where)
    natural = (ShardingSpec(((), ())), ShardingSpec(((), ()), ("a0",)))
    for dims, allowed in itertools.product(itertools.product(SIZES, repeat=2), (False, True)):
        found = layouts.completions(layouts.number(natural), dims, allowed)
        pairs = list(zip(found.rows.tolist(), found.columns.tolist(), strict=True))
        reached = [
            tuple(found.finals[column] for row, column in pairs if row == number)
            for number in range(2)
        ]
        assert reached == [completed_specs(one, dims, where, allowed) for one in natural]


def test_meshes_that_differ_in_their_links_only_share_their_layouts():
    assert layouts_of(mesh((2, 4))) is layouts_of(mesh((2, 4), bandwidth=5e9))
    assert layouts_of(mesh((2, 4))) is not layouts_of(mesh((4, 2)))


def test_meshes_whose_axes_divide_alike_share_their_specs_but_not_their_parts():
    two, four = layouts_of(mesh((2, 4))), layouts_of(mesh((4, 8)))
    assert two.specs((8, 3)) is four.specs((32, 5))
    number = two.number(two.specs((8, 3)))
    assert two.parts(number).tolist() == [1, 4, 2, 8]
    assert four.parts(number).tolist() == [1, 8, 4, 32]
    assert two.specs((8, 8)) is not layouts_of(mesh((4, 2))).specs((8, 8))


def test_sizes_that_the_axes_divide_alike_share_their_strategies():
    layouts = layouts_of(mesh((2, 4)))
    small, large, odd = (
        layouts.strategies(ShardingRule.parse("a b -> a b", {"a": size, "b": 8}))
        for size in (8, 1024, 12)
    )
    assert small is large
    assert set(odd) < set(small)


def test_equal_tuples_are_one_with_one_number_and_one_hash():
    layouts = layouts_of(mesh((2,)))
    first, second = ((ShardingSpec((("a0",), ())),) for _ in range(2))
    assert layouts.same_tuple(first) is layouts.same_tuple(second)
    assert layouts.same_tuple(first) == first and hash(layouts.same_tuple(first)) == hash(first)
    assert layouts.number(first) == layouts.number(second)
    assert layouts.number((ShardingSpec(((), ())),)) != layouts.number(first)


def test_a_follower_takes_the_axes_of_its_operand_as_far_as_they_divide():
    layouts = layouts_of(mesh((2, 4)))
    rule = ShardingRule.parse("a, a b -> a b", {"a": 2, "b": 8})
    specs = (ShardingSpec(((),)), ShardingSpec((("a0",),)), ShardingSpec((("a0", "a1"),)))
    found = layouts.following(rule, 0, layouts.number(specs), False, False)
    assert [one.assignment for one in found] == [(), (("a", ("a0",)),), (("a", ("a0",)),)]
    assert found[1].results == (ShardingSpec((("a0",), ())),)


def test_axis_bits_name_the_axes_of_specs_and_of_all_that_a_strategy_touches():
    mesh = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=4)))
    layouts = layouts_of(mesh)
    specs = (
        ShardingSpec(((), ())),
        ShardingSpec((("x",), ())),
        ShardingSpec(((), ()), ("y",)),
        ShardingSpec((("x", "y"), ())),
    )
    assert layouts.axis_bits(layouts.number(specs)).tolist() == [0, 1, 2, 3]
    scattered = Strategy(
        assignment=(("k", ("x",)),),
        operands=(ShardingSpec((("x",),)),),
        results=(ShardingSpec((("y",),)),),
    )
    assert layouts.axis_bits(layouts.number((scattered,))).tolist() == [3]
