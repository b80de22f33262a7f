"""A small mesh stands for all whose axes divide alike: checked against what axes divide."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_interchange import LogicalMesh, MeshAxis
from ilp_sharding.strategies import ConversionTable, divisibility_of, sharding_specs

NAMES = "xyz"


def mesh(shape):
    axes = (MeshAxis(name=NAMES[k], size=size) for k, size in enumerate(shape))
    return LogicalMesh(axes=tuple(axes))


def subsets(names):
    return [
        some for count in range(len(names) + 1) for some in itertools.combinations(names, count)
    ]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(0, 200))
def test_axes_divide_the_size_that_stands_for_another_as_they_divide_that(shape, size):
    where = mesh(shape)
    alike = divisibility_of(where)
    assert alike.mesh.axis_names == where.axis_names
    for names in subsets(where.axis_names):
        stands = alike.size(size) % alike.mesh.size(names) == 0
        assert stands == (size % where.size(names) == 0)
    assert [axis.size > 1 for axis in alike.mesh.axes] == [size > 1 for size in shape]


@pytest.mark.parametrize(
    ("shape", "small"),
    [
        ((64,), (2,)),
        ((2, 8), (2, 4)),
        ((512, 8), (4, 2)),
        ((4, 4), (2, 2)),
        ((1, 8), (1, 2)),
        ((3, 8), (2, 3)),
        ((4, 8, 8), (2, 4, 4)),
    ],
)
def test_powers_of_two_and_axes_of_size_one_have_small_stand_ins(shape, small):
    assert divisibility_of(mesh(shape)).mesh.shape == small


def test_conversions_on_alike_meshes_are_priced_by_their_own_sizes():
    def seconds(kind, bytes, axes):
        return len(kind) * 1e-6 + bytes / 1e9

    for shape, dims in [((2, 4), (8, 8)), ((4, 8), (32, 32)), ((4, 4), (16, 4))]:
        where = mesh(shape)
        table = ConversionTable(dims, 4096.0, where, seconds)
        for one, two in itertools.product(sharding_specs(dims, where), repeat=2):
            total, local = 0.0, 4096.0 / math.prod(map(where.size, one.dims))
            for step in table.steps(one, two):
                parts = where.size(step.axes)
                if step.kind == "all-gather":
                    local *= parts
                if step.kind != "slice":
                    total += seconds(step.kind, local, step.axes)
                if step.kind in ("slice", "reduce-scatter"):
                    local /= parts
            assert table.seconds(one, two) == pytest.approx(total, abs=1e-12)
