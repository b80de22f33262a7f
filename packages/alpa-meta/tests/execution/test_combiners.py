"""XLA's combiners fill the buckets that the cost model prices."""

from typing import Any

import jax
import pytest

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.execution.combiners import combiner_options
from cost_model.collective import BUCKET_BYTES

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=8)))


def test_a_bucket_has_the_bytes_of_the_larger_side(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    options = combiner_options(MESH)
    assert options["xla_gpu_all_gather_combine_threshold_bytes"] == BUCKET_BYTES
    assert options["xla_gpu_all_reduce_combine_threshold_bytes"] == BUCKET_BYTES
    assert options["xla_gpu_reduce_scatter_combine_threshold_bytes"] == BUCKET_BYTES // 8


@pytest.mark.parametrize("name", sorted(combiner_options(MESH)))
def test_xla_knows_the_options(name):
    options: dict[str, Any] = {name: combiner_options(MESH)[name]}
    jax.jit(lambda: 0).lower().compile(compiler_options=options)


def test_what_the_user_set_is_left(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_all_gather_combine_threshold_bytes=1024")
    kept = combiner_options(MESH)
    assert "xla_gpu_all_gather_combine_threshold_bytes" not in kept and len(kept) == 2
