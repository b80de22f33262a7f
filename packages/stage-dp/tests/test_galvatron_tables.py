"""The joint search on layer tables of Galvatron: never slower than the plan its engine chose."""

import json
from pathlib import Path

import pytest

from alpa_interchange.menu import Affine, JointProblem, LayerMenu, LayerRow, MeshMenu
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup
from stage_dp import solve_joint

CASES = json.loads(Path(__file__).with_name("galvatron_layer_tables.json").read_text())["cases"]
MB = 2.0**20


def joint_problem(case):
    """Return the case with the partition free. Other memory of a stage counts with its end layer.

    The engine's objective, the sum of stage times, is the step of one microbatch.
    """
    num = case["num_stages"]
    stages = case["stages"] * (num if len(case["stages"]) == 1 else 1)
    memory = max(stage["avail_MB"] for stage in stages)
    layers = []
    for stage in stages:
        figures = [
            (size, time)
            for (repeat, size), (_, time) in zip(stage["mem_MB"], stage["time_s"], strict=True)
            for _ in range(repeat)
        ]
        layers += [(tuple(size), tuple(time), 0.0) for size, time in figures]
    if num > 1:
        for at in (0, -1):
            layers[at] = (*layers[at][:2], memory - stages[at]["avail_MB"])
    kinds = list(dict.fromkeys(layers))
    rows = tuple(
        tuple(
            LayerRow(
                forward=Affine(seconds / 3),
                backward_input=Affine(seconds * 2 / 3),
                state_bytes=(size + extra) * MB,
                layout_in=n,
                layout_out=n,
            )
            for n, (size, seconds) in enumerate(zip(sizes, times, strict=True))
        )
        for sizes, times, extra in kinds
    )
    count = len(kinds[0][0])
    menu = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=8 // num),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=8 // num),)),
        rows=rows,
        layouts=tuple(map(str, range(count))),
        conversion={
            (a, b): Affine(case["inter_s"][a][b]) for a in range(count) for b in range(count)
        },
    )
    return JointProblem(
        menu=LayerMenu(class_of_layer=tuple(map(kinds.index, layers)), meshes=(menu,)),
        batch_size=1,
        device_groups=(DeviceGroup(num_hosts=1, devices_per_host=8, memory=memory * MB),),
        schedules=("1f1b",),
        num_stages=num,
    )


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_no_plan_is_slower_than_galvatrons(case):
    plan = solve_joint(joint_problem(case))
    assert plan.lower_bound <= plan.step_seconds <= case["seconds"] * (1 + 1e-8)
    assert max(plan.peak_bytes) <= max(s["avail_MB"] for s in case["stages"]) * MB * (1 + 1e-9)
