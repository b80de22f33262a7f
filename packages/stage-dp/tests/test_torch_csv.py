"""Schedules as torch writes them."""

from stage_dp import order, torch_csv


def test_each_mesh_is_a_line_of_stage_kind_and_microbatch():
    assert torch_csv(order("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    split = torch_csv(order("zero-bubble-h1", 2, 2))
    assert split == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_a_mesh_lists_all_its_chunks():
    lines = torch_csv(order("interleaved-1f1b", 4, 2, num_meshes=2)).splitlines()
    assert [{action[0] for action in line.split(",")} for line in lines] == [{"0", "2"}, {"1", "3"}]
