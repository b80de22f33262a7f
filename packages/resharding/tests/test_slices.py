import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange.reshard import PlacedTensor, ReshardingTask
from alpa_interchange.tensor import ShardingSpec, TensorType
from resharding import Box, cut_slices, device_tiles
from resharding.cases import paper_cases, random_task
from resharding.slices import split_box


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans())
def test_slices_cover_every_target_tile_exactly_once_from_tiles_that_hold_them(seed, overlap):
    task = random_task(seed, overlap=overlap, longest=12)
    shape = task.tensor.shape
    source = device_tiles(task.source, shape, "source")
    target = device_tiles(task.target, shape, "target")
    covered = {device: np.zeros(shape, dtype=int) for device in target}
    for piece in cut_slices(task):
        assert piece.box.size > 0
        assert set(piece.holders) == {d for d, box in source.items() if box.contains(piece.box)}
        assert not set(piece.receivers) & set(piece.holders)
        assert set(piece.in_place) <= set(piece.holders)
        for device in piece.receivers + piece.in_place:
            covered[device][piece.box.within((0,) * len(shape))] += 1
    for device, box in target.items():
        wanted = np.zeros(shape, dtype=int)
        wanted[box.within((0,) * len(shape))] = 1
        np.testing.assert_array_equal(covered[device], wanted)


def test_uneven_borders_give_slices_of_their_true_sizes():
    # 3072 rows: source borders every 1536, target borders every 1024
    rows = [piece.box.shape[0] for piece in cut_slices(paper_cases()["case 6"])]
    assert rows == [1024, 512, 512, 1024]


def test_a_dim_that_the_mesh_does_not_divide_has_short_and_empty_tiles_at_the_end():
    placed = PlacedTensor(
        spec=ShardingSpec((("x",),)),
        axis_names=("x",),
        mesh_shape=(4,),
        devices=(0, 1, 2, 3),
        hosts=(0, 0, 0, 0),
    )
    tiles = device_tiles(placed, (5,), "source")
    assert [(box.start[0], box.stop[0]) for box in tiles.values()] == [
        (0, 2),
        (2, 4),
        (4, 5),
        (5, 5),
    ]


def test_a_scalar_is_one_slice_and_an_empty_tensor_is_none(make_task):
    assert len(cut_slices(make_task((), (2, 2), "", (1, 4), ""))) == 1
    assert cut_slices(make_task((0, 4), (2, 2), "R R", (1, 4), "R R")) == ()


def test_partial_layouts_are_refused_with_the_axes():
    task = paper_cases()["case 1"]
    partial = evolve(task.source, spec=ShardingSpec(((), (), ()), ("host",)))
    with pytest.raises(ValueError, match=r"source layout is an unreduced sum.*'host'.*reduce"):
        cut_slices(evolve(task, source=partial))


def test_one_device_on_two_hosts_is_refused():
    from resharding import plan

    spec = ShardingSpec(((),))
    sides = [
        PlacedTensor(spec=spec, axis_names=("x",), mesh_shape=(1,), devices=(7,), hosts=(host,))
        for host in (0, 1)
    ]
    with pytest.raises(ValueError, match="device 7 is on host 0 .* and on host 1"):
        plan(ReshardingTask(tensor=TensorType((2,), "int8"), source=sides[0], target=sides[1]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 7), max_size=3), st.integers(1, 12))
def test_a_split_box_is_covered_once_by_at_most_the_wanted_pieces(shape, count):
    whole = Box((0,) * len(shape), tuple(shape))
    pieces = split_box(whole, count)
    seen = np.zeros(shape, dtype=int)
    for piece in pieces:
        assert piece.size > 0
        seen[piece.within((0,) * len(shape))] += 1
    assert len(pieces) == min(count, whole.size)
    assert (seen == 1).all()
