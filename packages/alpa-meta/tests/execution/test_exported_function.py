"""Functions of arrays that travel: their keys do so as words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_meta.compat import row_major
from alpa_meta.errors import PlanError
from alpa_meta.execution.exported_function import as_host_array, exported, key_impl, words
from mesh_runtime import InProcessRuntime


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_known_by_their_implementation_and_travel_as_words(impl):
    key = jax.random.key(1, impl=impl)
    assert key_impl(key) == key_impl(jax.eval_shape(lambda: key)) == impl
    np.testing.assert_array_equal(words(key), jax.random.key_data(key))
    assert as_host_array(key).dtype == np.uint32


def test_other_arrays_travel_as_they_are():
    assert key_impl(np.ones(2)) is key_impl(3.0) is None
    assert as_host_array(2.0).dtype == np.float32
    assert as_host_array(np.arange(3)).dtype == np.int32
    assert as_host_array(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_an_exported_function_runs_on_devices_it_was_not_exported_with():
    devices = jax.devices()[:4]
    mesh = Mesh(np.array(devices).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    apart, whole = (NamedSharding(mesh.abstract_mesh, spec) for spec in (P("x", "y"), P()))

    def function(key, rows):
        return rows * 2, jax.random.split(key)[0]

    key, rows = jax.random.key(5), jnp.ones((4, 4), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (key, rows)]
    program = exported(function, shapes, [whole, whole], [apart, whole], "cpu")
    assert (program.shape, program.axis_names) == ((2, 2), ("x", "y"))
    given = [as_host_array(key), as_host_array(rows)]
    twice, drawn = InProcessRuntime([mesh]).init({0: program}, given)[0]
    assert twice.sharding == NamedSharding(mesh, P("x", "y")) and np.all(twice == 2)
    np.testing.assert_array_equal(drawn, jax.random.key_data(jax.random.split(key)[0]))


def test_a_callback_of_this_process_is_refused_with_what_to_do():
    whole = NamedSharding(AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,)), P())
    taken = jax.ShapeDtypeStruct((4,), np.float32)

    def calls_back(value):
        return [jax.pure_callback(np.sin, taken, value)]

    with pytest.raises(PlanError, match="cannot be sent to workers on Ray: .*take them out of the"):
        exported(calls_back, [taken], [whole], [whole], "cpu")


def test_a_call_that_other_versions_may_lack_is_sent():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh.abstract_mesh, P())
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    taken = jax.ShapeDtypeStruct(rows.shape, rows.dtype)

    def transformed(x):
        return [row_major(jnp.fft.fft(x).real)]

    program = exported(transformed, [taken], [whole], [whole], "cpu")
    (found,) = InProcessRuntime([mesh]).init({0: program}, [rows])[0]
    np.testing.assert_allclose(found, np.fft.fft(rows).real, atol=1e-6)
