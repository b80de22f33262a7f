import re
from importlib.util import find_spec

import pytest

from alpa_interchange.document import load
from alpa_interchange.reshard import ReshardingPlan
from resharding import check_plan
from resharding.cli import main

ARGUMENTS = ["plan", "--tensor", "int32[1024,1024]", "--from", "2x4:S0,R", "--to", "3x4:R,S0"]


def test_the_command_says_who_sends_what_to_whom_and_when(capsys, tmp_path):
    assert main([*ARGUMENTS, "--save", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "int32[1024, 1024], 4 MiB: broadcast, 1.68 ms, 1.003 x the lower bound 1.68 ms" in out
    assert "broadcast [0:512, 0:342] 0:0 -> 2:0 2:1 2:2 2:3 in 38 chunks" in out
    assert "host 0: 2 MiB out, 0 B in" in out
    check_plan(load(tmp_path / "plan.json", ReshardingPlan))


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs the extra resharding[picture]")
@pytest.mark.parametrize("source", ["2x4:S0,R", "1x2:S1,R"])
def test_the_picture_is_drawn(tmp_path, source):
    path = tmp_path / "plan.png"
    arguments = ["--from", source, "--to", "2x2@0:R,S01", "--tensor", "int8[40,8]"]
    assert (
        main(["plan", *arguments, "--picture", str(path), "--strategy", "global_all_gather"]) == 0
    )
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs the extra resharding[picture]")
def test_bars_of_relays_have_the_colour_of_where_their_bytes_come_from(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "plan.png"
    command = ["plan", "--tensor", "int8[8192]", "--from", "2x1:S0", "--to", "2x2:R"]
    command += ["--issue", "none", "--cluster", "latency=1e-5", "--picture", str(path)]
    greys = []
    for strategy in ("parallel_chains", "tile_all_gather"):
        assert main([*command, "--strategy", strategy]) == 0
        pixels = imread(path)[..., :3]
        greys.append(int((abs(pixels - 0xBB / 255) < 1e-3).all(axis=-1).sum()))
    relayed, gathered = greys
    assert 20 * relayed < gathered  # a gather moves what came from both hosts


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs the extra resharding[picture]")
def test_the_picture_of_many_devices_can_be_opened(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "plan.png"
    command = ["plan", "--tensor", "int8[210]", "--from", "1x1:R", "--to", "3x70:S01"]
    assert main([*command, "--picture", str(path)]) == 0
    assert imread(path).shape[0] < 8192


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--from": "2x4"}, "a layout must look like 2x4:S0,R"),
        ({"--from": "0x4:R,R"}, "a mesh has at least one host"),
        ({"--to": "3x4:R,S2"}, "a layout has one of R, S0, S1, S01, S10 per dim, got 'S2'"),
        ({"--to": "3x4:R"}, "ReshardingTask.target.spec has 1 dims"),
        ({"--tensor": "int32"}, r"a tensor must look like float32\[1024,512\]"),
        ({"--cluster": "card=3"}, "a network has nic, device, nics, latency, got 'card=3'"),
        ({"--cluster": "nic=fast"}, "nic of a network is a number, got 'fast'"),
        ({"--cluster": "nics=1.5"}, "nics of a network is a whole number, got 1.5"),
        ({"--cluster": "nics=inf"}, "nics of a network is a whole number, got inf"),
        ({"--cluster": "nic=1e9,nic=2e9"}, "a network names nic once"),
        ({"--cluster": "missing.json"}, "missing.json: cannot be read"),
        ({"--tensor": "int32[8 8]"}, r"a tensor must look like float32\[1024,512\]"),
        ({"--tensor": "int32[99999999999999999999,8]"}, r"a tensor has at most 2\*\*50 elements"),
        ({"--tensor": "float99[8,8]"}, "dtype 'float99' has no known size"),
        ({"--picture": "."}, "cannot be written: Is a directory; .* --picture"),
        ({"--save": "/dev/null/plan.json"}, "cannot be written: Not a directory; .* --save"),
        ({"--from": "9999999x9:S0,R"}, "a mesh has at most 16384 devices, got 89999991"),
    ],
)
def test_wrong_arguments_are_refused_with_one_line(capsys, changed, message):
    given = dict(zip(ARGUMENTS[1::2], ARGUMENTS[2::2], strict=True)) | changed
    assert main(["plan", *(part for pair in given.items() for part in pair)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


def test_the_network_of_the_command_sets_the_time(capsys):
    # 4 MiB into one host at 4 MiB/s a card
    for cards, seconds in (("1", "1 s"), ("2", "500 ms")):
        text = f"nic=4194304,nics={cards}"
        arguments = [*ARGUMENTS, "--from", "1x4:S1,R", "--to", "1x4:S1,R", "--cluster", text]
        assert main(arguments) == 0
        assert f"broadcast, {seconds}, 1.000 x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tensor", "source", "target"),
    [
        ("float32[]", "2x2:", "2x2:"),
        ("float32[0,8]", "2x2:S0,R", "2x2:R,S0"),
        ("int4[7,3]", "2x4:S01,R", "3x2:R,S10"),
        ("int4[1,]", "1x1:R", "1x1@0:R"),
    ],
)
def test_scalars_and_empty_uneven_and_sub_byte_tensors_are_planned(
    capsys, tmp_path, tensor, source, target
):
    path = tmp_path / "plan.json"
    command = ["plan", "--tensor", tensor, "--from", source, "--to", target, "--save", str(path)]
    for issue in ("host", "device", "none"):
        assert main([*command, "--issue", issue, "--cluster", "nics=2,latency=1e-5"]) == 0
        check_plan(load(path, ReshardingPlan))
    assert capsys.readouterr().err == ""
