"""The menu beside a plan's file."""

from alpa_interchange import (
    ClusterSpec,
    DeviceSpec,
    HostGroup,
    KeptMenu,
    LinkSpec,
    LogicalMesh,
    MeshAxis,
    ShardingSpec,
    SubmeshSpec,
    from_json,
    menu_path,
    to_json,
)
from alpa_interchange.kept_menu import BoundaryLayout, MenuLeaf, RowSpecs
from alpa_interchange.menu import Affine, AxisPart, LayerMenu, LayerRow, MeshMenu

ROW = LayerRow(
    forward=Affine(1.0, 2.0),
    backward_input=Affine(0.0, 1.0),
    forward_sent=(AxisPart(axis=0, latency=Affine(0.5), bytes=Affine(0.25, 0.5)),),
    layout_out=1,
    key="none 8 free",
)
MESH = MeshMenu(
    submesh=SubmeshSpec(num_hosts=1, devices_per_host=2),
    logical=LogicalMesh(axes=(MeshAxis(name="x", size=2),)),
    rows=((ROW,),),
    layouts=("whole", "cut"),
    conversion={(1, 0): Affine(1e-3)},
    conversion_sent={(1, 0): (AxisPart(axis=0, bytes=Affine(1e-3)),)},
)
LINK = LinkSpec(name="wire", bandwidth=1e9, latency=1e-6)
DEVICE = DeviceSpec(name="chip", memory=1e9, memory_bandwidth=1e11, peak_flops={"float32": 1e12})
HOSTS = HostGroup(device=DEVICE, num_hosts=1, devices_per_host=2, intra_host=LINK, inter_host=LINK)
MENU = KeptMenu(
    fingerprint="f",
    cluster=ClusterSpec(name="two", host_groups=(HOSTS,)),
    batch_size=8,
    counts=(1, 2),
    schedules=("1f1b",),
    menu=LayerMenu(class_of_layer=(0, 0), meshes=(MESH,)),
    crossing=((BoundaryLayout(bytes=0.0), BoundaryLayout(bytes=64.0, device_share=0.5)),),
    leaves=(MenuLeaf(path="w", shape=(4, 4), dtype="float32", layer=0, start=0, stop=4),),
    specs=(ShardingSpec((("x",), ())),),
    state=(RowSpecs(mesh=0, key=ROW.key, specs=((0,),)),),
)


def test_a_menu_is_read_as_it_was_written():
    assert from_json(to_json(MENU), KeptMenu) == MENU


def test_it_lies_beside_its_plan():
    assert menu_path("runs/plan.json").as_posix() == "runs/plan.menu.json"
    assert menu_path("plan").name == "plan.menu.json"
