"""Conversions between sharding specs: cheapest collectives, checked against brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange import LogicalMesh, MeshAxis, ShardingSpec
from ilp_sharding.strategies.conversions import Conversions, ConversionTable, sharding_specs

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=4)))
FACTOR = {"all-gather": 1.0, "all-to-all": 0.6, "all-reduce": 1.0, "reduce-scatter": 0.5}


def seconds(kind, bytes, axes):
    """Return a second per byte times a factor by kind; more axes cost a little more."""
    return bytes * FACTOR[kind] * (1 + 0.1 * len(axes))


def spec(text, *partial):
    """Return the spec written with one letter per axis and a dot per whole dim."""
    return ShardingSpec(tuple(() if p == "." else tuple(p) for p in text.split()), partial)


@pytest.fixture(scope="module")
def table():
    return ConversionTable((8, 8), 256.0, MESH, seconds)


def kinds(table, source, target):
    return [(step.kind, step.axes) for step in table.steps(source, target)]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (spec("x ."), spec("x ."), []),
        (spec(". ."), spec("x y"), [("slice", ("x",)), ("slice", ("y",))]),
        (spec("x ."), spec(". ."), [("all-gather", ("x",))]),
        (spec("x ."), spec(". x"), [("all-to-all", ("x",))]),
        (spec(". .", "x"), spec(". ."), [("all-reduce", ("x",))]),
        (spec(". .", "x"), spec(". x"), [("reduce-scatter", ("x",))]),
        (spec("y .", "x"), spec("yx ."), [("reduce-scatter", ("x",))]),
    ],
)
def test_the_cheapest_conversion_is_the_collective_one_would_choose(
    table, source, target, expected
):
    found = kinds(table, source, target)
    assert sorted(found) == sorted(expected)


def test_slicing_is_free_but_doing_nothing_is_better(table):
    assert table.seconds(spec(". ."), spec(". .")) == 0.0
    assert 0 < table.seconds(spec(". ."), spec("x .")) < 1e-9


def test_costs_grow_with_what_is_moved(table):
    assert table.seconds(spec("x ."), spec(". .")) == pytest.approx(256 * 1.1)
    assert table.seconds(spec("x y"), spec(". y")) == pytest.approx(64 * 1.1)
    assert table.seconds(spec(". .", "x"), spec(". .")) == pytest.approx(256 * 1.1)


def test_a_whole_value_becomes_a_sum_of_itself_and_zeros_for_free(table):
    assert table.seconds(spec(". ."), spec(". .", "x")) < 1e-12
    (step,) = table.steps(spec(". ."), spec(". .", "x"))
    assert (step.kind, step.axes) == ("mask", ("x",))


@pytest.mark.parametrize("wrong", ["w .", "x"])
def test_a_spec_that_the_tensor_cannot_have_is_refused(table, wrong):
    with pytest.raises(ValueError, match="a spec must have one entry per dim"):
        table.steps(spec(". ."), spec(wrong))


def test_the_triangle_inequality_holds_between_all_specs(table):
    specs = sharding_specs((8, 8), MESH)
    matrix = table.matrix(specs, specs)
    assert (np.diag(matrix) == 0).all()
    through = (matrix[:, :, None] + matrix[None, :, :]).min(1)
    assert (matrix <= through + 1e-9).all()


def apply(state, step):
    """Return the spec after a step."""
    dims = [list(dim) for dim in state.dims]
    partial = [axis for axis in state.partial if axis not in step.axes]
    if step.kind in ("slice", "reduce-scatter"):
        dims[step.dim] += step.axes
    elif step.kind == "all-gather":
        assert dims[step.dim][-1:] == list(step.axes)
        dims[step.dim] = dims[step.dim][:-1]
    elif step.kind == "all-to-all":
        assert dims[step.dim][-1:] == list(step.axes)
        dims[step.dim] = dims[step.dim][:-1]
        dims[step.to_dim] += step.axes
    return ShardingSpec(tuple(map(tuple, dims)), tuple(partial))


def test_the_steps_of_every_conversion_lead_from_one_spec_to_the_other(table):
    specs = [
        *sharding_specs((8, 8), MESH),
        spec(". .", "x"),
        spec("x .", "y"),
        spec(". .", "x", "y"),
    ]
    for source, target in itertools.product(specs, specs[: len(specs) - 3]):
        state = source
        for step in table.steps(source, target):
            state = apply(state, step)
        assert state == target


def test_specs_of_a_shape_are_those_that_divide_it():
    assert [str(s) for s in sharding_specs((6,), MESH)] == ["[·]", "[x]"]
    assert len(sharding_specs((8, 8), MESH)) == 9
    assert sharding_specs((), MESH) == (ShardingSpec(()),)
    expected = {
        homes
        for homes in itertools.product((None, 0, 1), repeat=2)
        if 4 % math.prod([s for s, h in zip((2, 4), homes) if h == 0]) == 0
        and 2 % math.prod([s for s, h in zip((2, 4), homes) if h == 1]) == 0
    }
    assert len(sharding_specs((4, 2), MESH)) == len(expected)


# ------------------------------------------------------------------ shared tables


@settings(max_examples=40, derandomize=True)
@given(
    st.tuples(st.sampled_from([1, 2, 3, 4, 8, 24]), st.sampled_from([2, 8, 16])),
    st.floats(1.0, 1e9),
)
def test_shared_tables_give_the_steps_and_seconds_of_own_ones(shape, bytes):
    shared = Conversions(MESH, seconds)
    own = ConversionTable(shape, bytes, MESH, seconds)
    specs = sharding_specs(shape, MESH)
    matrix = shared.matrix(shape, bytes, specs, specs)
    for i, source in enumerate(specs):
        for j, target in enumerate(specs):
            assert shared.seconds(shape, bytes, source, target) == pytest.approx(
                own.seconds(source, target), rel=1e-6, abs=1e-12
            )
            assert matrix[i, j] == pytest.approx(own.seconds(source, target), rel=1e-6, abs=1e-12)


def test_tensors_divided_alike_share_a_table():
    shared = Conversions(MESH, seconds)
    assert shared.table((8, 16), 700.0) is shared.table((16, 24), 1000.0)
    assert shared.table((8, 16), 700.0) is not shared.table((8, 4), 700.0)
    assert shared.table((8, 16), 700.0) is not shared.table((8, 16), 700e3)


def test_an_empty_tensor_costs_nothing_to_convert():
    shared = Conversions(MESH, seconds)
    specs = sharding_specs((0, 8), MESH)
    assert not shared.matrix((0, 8), 0.0, specs, specs).any()
