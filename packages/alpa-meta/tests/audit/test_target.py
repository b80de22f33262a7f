"""Compiling for GPUs that are not there; needs the CUDA plugin wheels for the real thing."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import perceptron
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from alpa_meta.audit.account import account
from alpa_meta.audit.hlo import compiled_collectives
from alpa_meta.audit.memory import memory_check
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.audit.planner_plans import audit_planned
from alpa_meta.audit.target import TARGETS, compile_for, parse_target, target_devices
from alpa_meta.errors import PlanError
from alpa_meta.options import Options
from cost_model import cluster

HAS_CUDA_COMPILER = find_spec("jax_cuda12_plugin") is not None


def test_a_target_is_a_gpu_and_a_number_of_devices():
    assert parse_target("h100:8") == (TARGETS["h100"], 8)
    assert parse_target("A100:32") == parse_target("a100-80gb:32") == (TARGETS["a100-80gb"], 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b300:8", "must name one of a100-80gb, h100 and a number of devices"),
        ("h100", "needs a number of devices, such as h100:8"),
        ("h100:0", "needs a number of devices"),
        ("h100:12", "whole hosts of 8 devices, got 12"),
    ],
)
def test_a_target_that_cannot_be_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        parse_target(text)


@pytest.mark.skipif(HAS_CUDA_COMPILER, reason="the CUDA compiler is installed")
def test_without_the_extra_the_error_says_what_to_install():
    with pytest.raises(PlanError, match=r"pip install 'alpa-meta\[audit-gpu\]'"):
        target_devices(TARGETS["h100"], 8)


def test_a_description_states_the_published_figures():
    text = TARGETS["h100"].text_proto()
    assert "core_count: 132" in text and "major: 9 minor: 0" in text
    assert text.count("{") == text.count("}")


def test_every_target_is_a_cluster_preset_that_can_be_planned_for():
    for name in TARGETS:
        assert cluster(f"{name}:8").host_groups[0].device.name == name


@pytest.mark.skipif(not HAS_CUDA_COMPILER, reason="needs the extra audit-gpu")
@pytest.mark.parametrize("name", ["h100:8", "a100:16"])
def test_a_gpu_program_is_compiled_and_audited_without_a_gpu(name):
    target, count = parse_target(name)
    sizes = {"data": count // 4, "model": 4}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 2)
    rows = PartitionSpec("data")

    def body(x):
        return (
            lax.psum(x.astype(jnp.bfloat16), "model"),
            lax.psum_scatter(x, "model", tiled=True),
            lax.psum(x, "data"),
            lax.psum(2 * x, "data"),
        )

    program = jax.shard_map(
        body, mesh=mesh, in_specs=rows, out_specs=PartitionSpec(), check_vma=False
    )
    shape = jax.ShapeDtypeStruct((8 * sizes["data"], 32), jnp.float32)
    compiled = compile_for(target_devices(target, count), sizes, program, [shape], [rows])
    plan = [
        PlannedCollective(kind="all-reduce", axes=("model",), bytes=512, dtype="bfloat16"),
        PlannedCollective(kind="reduce-scatter", axes=("model",), bytes=256, dtype="float32"),
        *[PlannedCollective(kind="all-reduce", axes=("data",), bytes=1024, dtype="float32")] * 2,
    ]
    found = compiled_collectives(compiled.as_text() or "")
    report = account(plan, found, sizes, backend="cuda")
    assert report.equal, report.text()
    assert not account(plan[:-1], found, sizes, backend="cuda").ok
    assert memory_check(compiled).argument_bytes == 1024


@pytest.mark.skipif(not HAS_CUDA_COMPILER, reason="needs the extra audit-gpu")
def test_a_parameter_in_pieces_is_not_held_whole_between_the_passes():
    # as many bytes of weights as of activations
    model = perceptron.model(width=4096, depth=12, rows=8 * 4096)
    options = Options(num_stages=1, num_microbatches=1, preset="zero3", mesh_shape=(8,))
    audit = audit_planned(model, "h100:8", options, numerics=False)
    assert audit.ok, audit.text()
