import importlib.util
import os
import sys

import pytest

if importlib.util.find_spec("typer") is None or importlib.util.find_spec("rich") is None:
    pytest.skip("typer or rich is missing: the extra cost-model[cli]", allow_module_level=True)

from typer.testing import CliRunner

from cost_model import cli, stored_profile

run = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke


def test_all_presets_are_listed():
    result = run(cli.app, ["clusters"])
    assert result.exit_code == 0
    for name in ("p3.16xlarge", "selene", "h800", "tpu-v5p", "host"):
        assert name in result.output


def test_one_cluster_is_printed_with_sources():
    result = run(cli.app, ["clusters", "h100:16"])
    assert result.exit_code == 0
    assert "2 x 8" in result.output and "data sheet" in result.output


def test_a_wrong_name_is_answered_with_close_ones():
    result = run(cli.app, ["clusters", "h10"])
    assert result.exit_code == 2 and "h100" in result.output


def test_calibration_stores_a_profile_and_two_are_compared(made_up_machine, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "JaxMeasurer", made_up_machine)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    for path in (first, second):
        result = run(cli.app, ["calibrate", "--out", str(path)])
        assert result.exit_code == 0, result.output
        assert "Profile imaginary-9000" in result.output and path.exists()
        assert "compiling" in result.output and "matmul" in result.output  # no bar: lines
    result = run(cli.app, ["calibrate", "--diff", str(first), str(second)])
    assert result.exit_code == 0 and "memory bandwidth" in result.output
    result = run(cli.app, ["calibrate"])
    assert result.exit_code == 0 and stored_profile("imaginary-9000") is not None


def test_host_devices_are_asked_for_before_jax_starts(made_up_machine, monkeypatch):
    monkeypatch.setattr(cli, "JaxMeasurer", made_up_machine)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--some_flag=1")
    assert run(cli.app, ["calibrate", "--devices", "6"]).exit_code == 0
    assert "--some_flag=1 --xla_force_host_platform_device_count=6" in os.environ["XLA_FLAGS"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--devices", "0"], "at least 1"), (["--diff", "none.json", "none.json"], "none.json")],
)
def test_wrong_arguments_are_explained(arguments, message):
    result = run(cli.app, ["calibrate", *arguments])
    assert result.exit_code == 2 and message in result.output


def test_a_machine_without_jax_is_told_what_to_install(monkeypatch):
    def refuse():
        raise ImportError("calibration needs jax: install cost-model[calibrate]")

    monkeypatch.setattr(cli, "JaxMeasurer", refuse)
    result = run(cli.app, ["calibrate"])
    assert result.exit_code == 2 and "needs jax" in result.output
