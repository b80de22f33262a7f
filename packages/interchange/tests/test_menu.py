"""Layer menus: affine figures, conversions, and what they refuse."""

import math

import pytest

from alpa_interchange import DeviceGroup, LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.menu import Affine, JointProblem, LayerMenu, LayerRow, MeshMenu

ROW = LayerRow(forward=Affine(1.0, 0.5), backward_input=Affine(2.0))


def mesh(**changes):
    arguments = {
        "submesh": SubmeshSpec(num_hosts=1, devices_per_host=1),
        "logical": LogicalMesh(axes=(MeshAxis(name="data", size=1),)),
        "rows": ((ROW,),),
    }
    return MeshMenu(**{**arguments, **changes})


def test_an_affine_figure_grows_with_the_samples():
    assert Affine(1.0, 0.5).value(4) == 3.0


def test_layouts_without_a_conversion_follow_only_themselves():
    menu = mesh(layouts=("split", "whole"), conversion={(0, 1): Affine(0.25)})
    assert menu.convert(0, 1, 8) == 0.25
    assert menu.convert(1, 1, 8) == 0.0
    assert math.isinf(menu.convert(1, 0, 8))


def test_unknown_layouts_classes_groups_and_counts_are_refused():
    with pytest.raises(ValueError, match="layouts has 1 names"):
        mesh(conversion={(0, 1): Affine()})
    with pytest.raises(ValueError, match="classes 0..1"):
        LayerMenu(class_of_layer=(0, 1), meshes=(mesh(),))
    with pytest.raises(ValueError, match="one entry per class"):
        mesh(floors=((), ()))
    menu = LayerMenu(class_of_layer=(0,), meshes=(mesh(),))
    group = DeviceGroup(num_hosts=1, devices_per_host=1, memory=1.0)
    with pytest.raises(ValueError, match="divide batch_size=8"):
        JointProblem(menu=menu, batch_size=8, device_groups=(group,), counts=(3,))
    elsewhere = mesh(submesh=SubmeshSpec(num_hosts=1, devices_per_host=1, host_group=1))
    with pytest.raises(ValueError, match="on group 1"):
        JointProblem(
            menu=LayerMenu(class_of_layer=(0,), meshes=(elsewhere,)),
            batch_size=8,
            device_groups=(group,),
        )
