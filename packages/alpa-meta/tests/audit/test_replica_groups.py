"""Replica groups in XLA's three syntaxes, and the mesh axes they are lines of."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from alpa_meta.audit.replica_groups import axes_of_groups, axes_of_pairs, read_groups

CUBE = {"data": 2, "expert": 2, "model": 2}


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={{0, 2}, {1, 3}}, dimensions={0}", ((0, 2), (1, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}",
            ((0, 2), (1, 3)),
        ),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("to_apply=%add", ((0, 1, 2, 3),)),
    ],
)
def test_every_syntax_of_xla_is_read(written, groups):
    assert read_groups(f"%r = f32[4] all-reduce(%p), channel_id=1, {written}", 4) == groups


def test_a_syntax_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="must be listed, tiled or by mesh axes"):
        read_groups("all-reduce(%p), replica_groups=rows(4)", 4)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_lines_of_every_set_of_axes_are_named_by_it(count):
    ids = np.arange(8).reshape(tuple(CUBE.values()))
    for chosen in combinations(range(3), count):
        fixed = [dim for dim in range(3) if dim not in chosen]
        rows = ids.transpose([*fixed, *chosen]).reshape(-1, 2**count)
        groups = tuple(tuple(int(device) for device in row) for row in rows[::-1])
        names = tuple(sorted(list(CUBE)[dim] for dim in chosen))
        assert axes_of_groups(groups, CUBE) == names


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1), (2, 3), (4, 6), (5, 7)),  # along two axes at once
        ((0, 3), (1, 2), (4, 7), (5, 6)),  # diagonals
        ((0, 1), (2, 3)),  # not all devices
        ((0, 1, 2), (3, 4, 5), (6, 7)),  # unequal
    ],
)
def test_groups_that_are_no_lines_are_named_by_none(groups):
    assert axes_of_groups(groups, CUBE) is None


def test_groups_of_one_device_have_no_axes():
    assert axes_of_groups(tuple((device,) for device in range(8)), CUBE) == ()


def test_part_of_an_axis_is_not_the_axis():
    halves = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert axes_of_groups(halves, {"data": 2, "model": 4}) is None


def test_pairs_are_named_by_the_axes_they_move_along():
    assert axes_of_pairs(((0, 1), (2, 3)), CUBE) == ("model",)
    assert axes_of_pairs(((0, 4), (1, 5), (0, 1)), CUBE) == ("data", "model")
    assert axes_of_pairs(((0, 0),), CUBE) == ()
    assert axes_of_pairs(((0, 8),), CUBE) is None
