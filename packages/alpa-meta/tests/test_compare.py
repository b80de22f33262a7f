"""The automatic plan beside presets."""

from __future__ import annotations

from importlib.util import find_spec
from io import StringIO
from typing import Any

import jax
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from alpa_meta.compare import AUTOMATIC, compare, compare_command, comparison_table
from alpa_meta.corpus import build
from alpa_meta.errors import PlanError
from alpa_meta.presets import Coverage

app = typer.Typer()
app.command()(compare_command)


def test_no_preset_is_predicted_faster_than_the_automatic_plan():
    found = compare(build("convnet"), "h100:8", ("dp", "zero3", "megatron"), mesh_shape=(2, 4))
    assert [one.strategy for one in found] == [AUTOMATIC, "dp", "zero3", "megatron"]
    seconds = [one.step_seconds for one in found if one.step_seconds is not None]
    assert len(seconds) == 4 and seconds[0] == min(seconds)
    dp, zero3 = found[1:3]
    assert dp.num_collectives and dp.sent_bytes and zero3.memory_bytes and dp.memory_bytes
    assert zero3.memory_bytes < dp.memory_bytes
    output = StringIO()
    Console(file=output, width=120).print(comparison_table("convnet", "h100:8", found))
    assert dp.covered == Coverage(0.0, 1.0) and zero3.covered == Coverage(1.0, 1.0)
    megatron = found[3]
    assert megatron.covered is not None
    assert megatron.covered.flops < 0.95 and "of the flops of products over" in megatron.note
    assert f"{megatron.covered.parameters:.0%}, {megatron.covered.flops:.0%}" in output.getvalue()
    assert "predicted step" in output.getvalue() and "measured" not in output.getvalue()


@pytest.mark.skipif(find_spec("equinox") is None, reason="equinox is not installed")
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 host devices")
def test_a_compared_preset_runs_and_is_audited():
    found = compare(build("equinox-mlp"), "host:8", ("dp",), num_steps=1, mesh_shape=(8,))
    assert all(one.audited and one.measured_seconds for one in found)


def test_a_preset_that_does_not_fit_says_so():
    settings: dict[str, Any] = {"memory": 1e3, "mesh_shape": (8,)}
    found = compare(build("convnet"), "h100:8", ("dp",), **settings)
    assert all("does not fit" in one.note and one.step_seconds is None for one in found)
    Console(file=StringIO()).print(comparison_table("convnet", "h100:8", found))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gtp"], "no model 'gtp'"),
        (["gpt", "--preset", "tensor"], "no preset 'tensor'"),
        (["gpt", "--cluster", "abacus:8"], "abacus"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, PlanError)
    assert message in str(result.exception)
