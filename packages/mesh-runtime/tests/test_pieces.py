import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_runtime.pieces import assemble, assign_pieces, box_of, device_boxes, pack, unpack

SPECS = [(), ("data",), (None, "model"), (("model", "data"),), ("model", "data")]


@pytest.mark.parametrize("spec", SPECS)
def test_tiles_are_those_of_jax(meshes, spec):
    (mesh,) = meshes(1, (2, 4))
    indices = NamedSharding(mesh, P(*spec)).devices_indices_map((16, 8))
    expected = [box_of(indices[device], (16, 8)) for device in mesh.devices.flat]
    assert device_boxes((16, 8), spec, (2, 4), ("data", "model")) == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(SPECS),
    st.sampled_from(SPECS),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
)
def test_sent_pieces_rebuild_every_tile_of_every_target_host(before, after, senders, receivers):
    shape, names = (16, 8), ("data", "model")
    whole = np.random.default_rng(0).normal(size=shape)

    def hosts(spec, count):
        boxes = device_boxes(shape, spec, (2, 4), names)
        return [(k * count // len(boxes), box) for k, box in enumerate(boxes)]

    source, target = hosts(before, senders), hosts(after, receivers)
    assigned = assign_pieces(source, target)
    arrived = {host: [] for host in range(receivers)}
    for (sender, receiver), boxes in assigned.items():
        tiles = {
            box: whole[tuple(slice(a, b) for a, b in box)] for host, box in source if host == sender
        }
        payload = np.concatenate(pack(boxes, tiles))
        arrived[receiver] += unpack(payload, boxes, whole.dtype)
    for host, box in target:
        tile = assemble(box, arrived[host], whole.dtype)
        np.testing.assert_array_equal(tile, whole[tuple(slice(a, b) for a, b in box)])
    sizes = [sum(part.nbytes for _, part in arrived[host]) for host in arrived]
    needed = [
        sum(np.prod([b - a for a, b in box]) * 8 for box in {b for h, b in target if h == host})
        for host in arrived
    ]
    assert sizes == needed  # nothing is sent twice to a host


def test_replicated_values_leave_from_all_their_hosts_evenly():
    source = [(host, ((0, 8),)) for host in range(4)]
    target = [(host, ((2 * host, 2 * host + 2),)) for host in range(4)]
    assigned = assign_pieces(source, target)
    assert sorted(sender for sender, _ in assigned) == [0, 1, 2, 3]


def test_layouts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"dim 0 of a value of shape \(6,\) cannot be cut 4 ways"):
        device_boxes((6,), ("x",), (4,), ("x",))


def test_scalars_are_one_piece():
    assigned = assign_pieces([(0, ()), (1, ())], [(0, ())])
    assert list(itertools.chain(*assigned.values())) == [()]


def test_messages_of_the_wrong_size_and_missing_pieces_are_refused():
    with pytest.raises(ValueError, match="message of 7 bytes names boxes of 8 bytes"):
        unpack(np.zeros(7, np.uint8), [((0, 2),)], "float32")
    with pytest.raises(ValueError, match="2 elements of the tile"):
        assemble(((0, 4),), [(((0, 2),), np.zeros(2, np.float32))], "float32")
