"""A stage boundary of a menu costs what the resharding planner predicts for its transfer."""

import itertools

import pytest
from attrs import evolve

from alpa_interchange import BoundaryLayout, BoundaryValue, ShardingSpec, SubmeshSpec
from alpa_interchange.menu import Affine, LayerMenu, LayerRow, MeshMenu
from alpa_interchange.reshard import PlacedTensor, ReshardingTask
from alpa_interchange.tensor import TensorType
from alpa_meta.inter_op.layer_boundaries import held_shares
from alpa_meta.planning.menu_problem import boundary_floor_of, boundary_of
from cost_model import CostModel, cluster
from resharding import plan
from resharding.network import network_of

MODEL = CostModel(cluster("p3.16xlarge:4x8"))
SHAPE = (64, 1024, 2048)  # examples, tokens, features
BYTES = 4.0 * 64 * 1024 * 2048
SPECS = [
    ShardingSpec(dims)
    for dims in ((("x", "y"), (), ()), (("x",), (), ()), (("y",), (), ()), ((), (), ()),
                 (("x",), (), ("y",)), ((), ("x", "y"), ()))
]  # fmt: skip


def _mesh(layouts, hosts, devices, shape):
    submesh = SubmeshSpec(num_hosts=hosts, devices_per_host=devices)
    return MeshMenu(
        submesh=submesh,
        logical=MODEL.logical_mesh(submesh, shape, ("x", "y")),
        rows=((LayerRow(forward=Affine(), backward_input=Affine()),),),
        layouts=tuple(map(str, layouts)),
    )


def _placed(spec, mesh, first):
    devices = range(first, first + mesh.submesh.num_devices)
    return PlacedTensor(
        spec=spec,
        axis_names=mesh.logical.axis_names,
        mesh_shape=mesh.logical.shape,
        devices=tuple(devices),
        hosts=tuple(device // 8 for device in devices),
    )


def _layouts(mesh, specs, known):
    """Return the layouts of the tensor on a mesh, with or without the values they are of."""
    tensor = TensorType(SHAPE, "float32")
    found = []
    for spec in specs:
        on_host, on_device = held_shares(spec, mesh.logical, mesh.submesh.num_hosts)
        found.append(
            BoundaryLayout(
                bytes=BYTES / SHAPE[0],
                host_share=on_host,
                device_share=on_device,
                values=(BoundaryValue(tensor=tensor, spec=spec),) if known else (),
            )
        )
    return found


def _predicted(spec, mesh, first, its, other, start, link):
    task = ReshardingTask(
        tensor=TensorType(SHAPE, "float32"),
        source=_placed(spec, mesh, first),
        target=_placed(its, other, start),
    )
    network = network_of(MODEL.cluster, issue="none")
    if link == "host":  # a network has one latency, that of its slowest hops
        network = evolve(network, latency=MODEL.cluster.host_groups[0].intra_host.latency)
    return plan(task, network).seconds


@pytest.mark.parametrize(
    ("before", "after", "link"),
    [
        ((1, 4, (2, 2)), (1, 4, (4, 1)), "host"),
        ((1, 8, (2, 4)), (1, 8, (4, 2)), "hosts"),
        ((2, 8, (4, 4)), (2, 8, (2, 8)), "hosts"),
        ((2, 8, (8, 2)), (1, 8, (2, 4)), "hosts"),
    ],
)
def test_a_boundary_costs_what_its_transfers_are_predicted_to_take(before, after, link):
    meshes = _mesh(SPECS, *before), _mesh(SPECS, *after)
    menu = LayerMenu(class_of_layer=(0,), meshes=meshes)
    price, least = (
        boundary_of(menu, [_layouts(mesh, SPECS, known) for mesh in meshes], MODEL)
        for known in (True, False)
    )
    for i, j in itertools.product(range(len(SPECS)), repeat=2):
        start = meshes[0].submesh.num_devices
        there = _predicted(SPECS[i], meshes[0], 0, SPECS[j], meshes[1], start, link)
        back = _predicted(SPECS[j], meshes[1], start, SPECS[i], meshes[0], 0, link)
        seconds = price(0, i, 1, j, link).value(SHAPE[0])
        assert seconds == pytest.approx(max(there, back), rel=0.01)
        # What is left without the values is a bound of it; a tensor whole on two hosts is above.
        assert 0.7 * seconds < least(0, i, 1, j, link).value(SHAPE[0]) < 1.001 * seconds


@pytest.mark.parametrize("sizes", [((1, 4), (1, 4)), ((1, 8), (2, 8)), ((2, 8), (1, 2))])
@pytest.mark.parametrize("known", [True, False])
def test_no_layout_crosses_for_less_than_the_floor_of_its_boundary(sizes, known):
    shapes = [(*size, (size[0] * size[1] // 2, 2)) for size in sizes]
    meshes = tuple(_mesh(SPECS, *shape) for shape in shapes)
    crossing = [_layouts(mesh, SPECS, known) for mesh in meshes]
    menu = LayerMenu(class_of_layer=(0,), meshes=meshes)
    price, floor = boundary_of(menu, crossing, MODEL), boundary_floor_of(menu, crossing, MODEL)
    for a, b, link in itertools.product((0, 1), (0, 1), ("host", "hosts")):
        least = floor(0, a, b, link)
        layouts = itertools.product(range(len(SPECS)), repeat=2)
        prices = [price(a, out, b, into, link) for out, into in layouts]
        assert 0 < least.fixed <= min(p.fixed for p in prices) * (1 + 1e-9)
        # Reached by the layout that cuts the tensor over all devices of both.
        assert least.each == pytest.approx(min(p.each for p in prices), rel=0.03)
        assert least.each <= min(p.each for p in prices) * (1 + 1e-9)


def test_shares_are_those_of_the_fullest_host_and_device():
    mesh = MODEL.logical_mesh(SubmeshSpec(num_hosts=2, devices_per_host=4), (4, 2), ("x", "y"))
    assert held_shares(ShardingSpec((("x",), ())), mesh, 2) == (0.5, 0.25)
    assert held_shares(ShardingSpec((("y",), ())), mesh, 2) == (1.0, 0.5)
    assert held_shares(ShardingSpec(((), ())), mesh, 2) == (1.0, 1.0)
    assert held_shares(ShardingSpec((("y",), ("x",))), mesh, 2) == (0.5, 0.125)
