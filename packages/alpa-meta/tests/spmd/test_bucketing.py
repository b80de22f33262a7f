import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from alpa_meta.audit.hlo import compiled_collectives
from alpa_meta.spmd import HOST_BUCKETS, BucketLimits
from alpa_meta.spmd.bucketing import in_buckets

BOTH = ("x", "y")


def compiled(function, args, limits):
    """Return (results, kinds of compiled collectives) of `function` of replicated `args`.

    Every device computes on different numbers: `function` gets them plus the device's position.
    """
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), BOTH, axis_types=(AxisType.Auto,) * 2)

    def on_device(*values):
        here = lax.axis_index(BOTH)
        shifted = [value + here.astype(value.dtype) for value in values]
        return [out[None] for out in in_buckets(function, limits)(*shifted)]

    program = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(BOTH),
            check_vma=False,
        ),
        compiler_options={
            "xla_backend_optimization_level": 0,
            "xla_disable_hlo_passes": "cpu-all-reduce-combiner",
        },
    )
    lowered = program.lower(*args).compile()
    kinds = sorted(one.kind for one in compiled_collectives(lowered.as_text() or ""))
    return [np.asarray(out) for out in lowered(*args)], kinds


def check(function, args, kinds):
    """Require the same results to the bit, and collectives of `kinds` where they are in buckets."""
    alone, _ = compiled(function, args, None)
    together, found = compiled(function, args, HOST_BUCKETS)
    assert found == kinds
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def tensor(*shape, dtype=jnp.float32):
    return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)


def test_sums_over_the_same_axes_are_sent_as_one():
    def sums(a, b, c):
        return [lax.psum(a, BOTH), lax.psum(b * 2, BOTH), lax.psum(c, BOTH)]

    check(sums, [tensor(3, 4), tensor(5), tensor()], ["all-reduce"])


def test_kinds_axes_and_dtypes_stay_apart():
    def mixed(a, b):
        return [lax.psum(a, "x"), lax.psum(a, "y"), lax.pmax(a, "x"), lax.psum(b, "x")]

    check(mixed, [tensor(4), tensor(4, dtype=jnp.int32)], ["all-reduce"] * 4)


@pytest.mark.parametrize("axes", [("x",), ("y",), BOTH])
def test_gathers_along_different_dims_are_sent_as_one(axes):
    def gathers(a, b, c):
        return [
            lax.all_gather(a, axes, axis=0, tiled=True),
            lax.all_gather(b, axes, axis=1, tiled=True),
            lax.all_gather(c, axes, axis=2, tiled=True),
        ]

    check(gathers, [tensor(3), tensor(2, 3), tensor(2, 3, 4)], ["all-gather"])


@pytest.mark.parametrize("axes", [("x",), ("y",), BOTH])
def test_scatters_along_different_dims_are_sent_as_one(axes):
    def scatters(a, b, c):
        return [
            lax.psum_scatter(a, axes, scatter_dimension=0, tiled=True),
            lax.psum_scatter(b, axes, scatter_dimension=1, tiled=True),
            lax.psum_scatter(c, axes, scatter_dimension=2, tiled=True),
        ]

    check(scatters, [tensor(8), tensor(2, 16), tensor(2, 3, 8)], ["reduce-scatter"])


@pytest.mark.parametrize("axes", [("x",), ("y",), BOTH])
def test_exchanges_of_different_dims_are_sent_as_one(axes):
    def exchanges(a, b):
        return [
            lax.all_to_all(a, axes, split_axis=0, concat_axis=1, tiled=True),
            lax.all_to_all(b, axes, split_axis=2, concat_axis=0, tiled=True),
        ]

    check(exchanges, [tensor(8, 3), tensor(2, 3, 16)], ["all-to-all"])


def test_what_depends_on_a_collective_is_not_sent_with_it():
    def chain(a, b):
        first = lax.psum(a, "x")
        return [lax.psum(first * b, "x"), lax.psum(b, "x")]

    check(chain, [tensor(4), tensor(4)], ["all-reduce"] * 2)


def test_buckets_that_would_wait_for_each_other_are_not_made():
    def crossed(a, b):
        sum_x, sum_y = lax.psum(a, "x"), lax.psum(b, "y")
        return [lax.psum(sum_x, "y"), lax.psum(sum_y, "x")]

    check(crossed, [tensor(4), tensor(4)], ["all-reduce"] * 3)


def test_a_sum_that_nobody_reads_is_not_sent():
    def wasteful(a, b):
        lax.psum(a * 3, "x")
        return [lax.psum(b, "x")]

    check(wasteful, [tensor(4), tensor(4)], ["all-reduce"])


def test_tensors_over_the_limit_go_alone_and_full_buckets_are_closed():
    limits = BucketLimits(tensor=64.0, bucket=128.0)

    def sums(*values):
        return [lax.psum(value, "x") for value in values]

    args = [tensor(17), tensor(16), tensor(16), tensor(16)]  # 68, 64, 64, 64 bytes
    _, kinds = compiled(sums, args, limits)
    assert kinds == ["all-reduce"] * 3


def test_programs_with_side_effects_are_left_alone():
    seen = []

    def shown(a, b):
        jax.debug.callback(lambda value: seen.append(value.shape), a)
        return [lax.psum(a, "x"), lax.psum(b, "x")]

    _, kinds = compiled(shown, [tensor(4), tensor(4)], HOST_BUCKETS)
    assert kinds == ["all-reduce"] * 2


def descent(weights, x):
    """Return (new weights, loss) of a scanned network, with a sum per layer in its backward."""

    def loss(weights):
        def layer(h, w):
            return jnp.tanh(h @ w["w"] + w["b"]), h.sum()

        h, sums = lax.scan(layer, x, weights["layers"])
        return jnp.mean((h @ weights["head"]) ** 2) + 1e-3 * sums.sum()

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


@pytest.mark.sample(seed=1)
@pytest.mark.parametrize("seed", range(3))
def test_a_training_step_in_buckets_is_right_whatever_its_plan(run, same, seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    weights = {
        "layers": {
            "w": jax.random.normal(keys[0], (3, 16, 16)) / 4,
            "b": jax.random.normal(keys[1], (3, 16)),
        },
        "head": jax.random.normal(keys[2], (16, 8)),
    }
    args = (weights, jax.random.normal(keys[3], (8, 16)))
    together = run(descent, args, (2, 4), seed=seed, buckets=HOST_BUCKETS)
    same(together)
    assert len(compiled_collectives(together.text)) < len(together.planned)
