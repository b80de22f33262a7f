import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.spmd import CollectiveLog, Collectives

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=4)))


def on_devices(function, value, spec, out):
    devices = Mesh(
        np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2
    )
    mapped = jax.shard_map(function, mesh=devices, in_specs=spec, out_specs=out, check_vma=False)
    return jax.jit(mapped)(value)


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ("y",)])
def test_several_axes_act_as_one_in_the_order_given(axes):
    collectives = Collectives(MESH)
    value = jnp.arange(16)

    def there_and_back(part):
        whole = collectives.all_gather(part, axes, 0, "test")
        return collectives.part(whole, axes, 0), whole

    part, whole = on_devices(
        there_and_back, value, PartitionSpec(axes), (PartitionSpec(axes), PartitionSpec())
    )
    np.testing.assert_array_equal(part, value)
    np.testing.assert_array_equal(whole, value)


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ("x",)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_values_gathered_and_scattered_in_blocks_are_those_of_jax(axes, dim):
    value = jnp.asarray(np.random.default_rng(dim).integers(-9, 9, (8, 16, 24)), jnp.float32)
    spec = PartitionSpec(*(axes if k == dim else None for k in range(3)))

    def both(part):
        plain, blocks = Collectives(MESH), Collectives(MESH, in_blocks=True)
        return [
            (whole, made.reduce_scatter(whole * (1 + made.index(axes)), axes, dim, "test"))
            for made in (plain, blocks)
            for whole in [made.all_gather(part, axes, dim, "test")]
        ]

    (whole, parts), (own_whole, own_parts) = on_devices(
        both, value, spec, [(PartitionSpec(), spec)] * 2
    )
    np.testing.assert_array_equal(own_whole, value)
    np.testing.assert_array_equal(own_whole, whole)
    np.testing.assert_array_equal(own_parts, parts)
    count = MESH.size(axes)
    np.testing.assert_array_equal(parts, value * (count * (count + 1) // 2))


def test_a_transposed_product_among_zeros_is_exchanged_on_host_devices():
    collectives, axes = Collectives(MESH, in_blocks=True), ("x", "y")

    def exchange(part):
        product = (part @ jnp.ones((2, 2))).T
        return collectives.all_to_all(jnp.pad(product, ((0, 14), (0, 0))), axes, 1, 0, "test")

    spec = PartitionSpec(None, axes)
    found = on_devices(exchange, jnp.arange(32.0).reshape(2, 16), spec, PartitionSpec(axes))
    products = jnp.arange(32.0).reshape(2, 8, 2).sum(-1)
    expected = np.zeros((16, 16))
    expected[:2] = jnp.broadcast_to(products[None], (2, 2, 8)).transpose(0, 2, 1).reshape(2, 16)
    np.testing.assert_array_equal(found, expected)


def test_a_shift_moves_to_the_next_device_and_leaves_zeros_behind():
    collectives = Collectives(MESH)
    axes = ("x", "y")
    moved = on_devices(
        lambda part: collectives.shift(part, axes, 1, "test"),
        jnp.arange(1, 9),
        PartitionSpec(axes),
        PartitionSpec(axes),
    )
    np.testing.assert_array_equal(moved, [0, 1, 2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize(("reduction", "expected"), [("max", [7, np.nan]), ("min", [0, np.nan])])
def test_nans_win_when_extremes_are_taken_over_devices(reduction, expected):
    collectives = Collectives(MESH)
    value = jnp.arange(8.0)[:, None] * jnp.ones(2)
    found = on_devices(
        lambda part: collectives.all_reduce(part, ("x", "y"), reduction, "test"),
        value.at[3, 1].set(jnp.nan),
        PartitionSpec(("x", "y")),
        PartitionSpec(),
    )
    np.testing.assert_array_equal(found[0], expected)


@pytest.mark.parametrize(("offset", "moved"), [(1, ("x", "y")), (4, ("x",))])
def test_a_shift_is_noted_under_the_axes_it_moves_along(offset, moved):
    log = CollectiveLog()
    collectives = Collectives(MESH, log)
    axes = ("x", "y")

    def shift(part):
        return collectives.shift(part, axes, offset, "test")

    on_devices(shift, jnp.arange(8), PartitionSpec(axes), PartitionSpec(axes))
    assert {one.axes for one in log.all()} == {moved}


def test_keys_and_flags_travel_too():
    collectives = Collectives(MESH)
    keys = jax.random.split(jax.random.key(0), 8)
    gathered = on_devices(
        lambda part: collectives.all_gather(part, ("y", "x"), 0, "test"),
        keys,
        PartitionSpec(("y", "x")),
        PartitionSpec(),
    )
    np.testing.assert_array_equal(jax.random.key_data(gathered), jax.random.key_data(keys))
    flags = jnp.array([False, True] * 4)
    both = on_devices(
        lambda part: (
            collectives.all_reduce(part, ("x", "y"), "or", "test"),
            collectives.all_reduce(part, ("x", "y"), "and", "test"),
        ),
        flags,
        PartitionSpec(("x", "y")),
        PartitionSpec(),
    )
    assert [bool(flag[0]) for flag in both] == [True, False]


def test_a_log_multiplies_trips_and_forgets_what_is_traced_again():
    log = CollectiveLog()
    one = PlannedCollective(kind="all-reduce", axes=("x",), bytes=4, dtype="float32")
    body = log.body(3)
    inner = body.body(2)
    for _ in range(2):
        body.restart()
        body.note(one)
    inner = body.body(2)
    inner.note(one)
    unknown = log.body(None)
    unknown.note(one)
    assert [found.trips for found in log.all()] == [3, 6, None]
